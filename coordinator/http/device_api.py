"""The HTTPS interfaces for devices: the TLS listeners, enrolment and renewal, and the carrier of artifacts.

They limit and check all input, and share no route with the operators' interface.

For enrolment a client certificate is optional in the handshake (a new device has none); for the carrier it is required. A certificate must be valid and issued by the coordinator's authority, else the handshake fails. The carrier serves only artifacts announced in signed MQTT messages. The register decides whether a device is still allowed, also during a transfer.
"""

import asyncio
import logging
import os
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from email.utils import formatdate
from functools import partial
from typing import Annotated, TypeVar

import anyio.to_thread
from cryptography import x509
from fastapi import FastAPI, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from coordinator.config import ListenerSettings
from coordinator.errors import HomeError, RefusedError
from coordinator.http.refusals import CountedEvent, FailureLimits, refusal, too_many
from coordinator.members.membership import Admission, member_of
from coordinator.service.coordinator import Coordinator
from coordinator.updates.receiver import Receiver
from fedcg.listening import ACCEPTS, Connections, Listener, http_config
from fedcg.wire import errors
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer import chunks
from fedcg.wire.transfer.chunk_sender import ChunkFile

HANDSHAKE_S = 5.0
KEEP_ALIVE_S = 20
PEER = "fedcg.peer"
"""Key in the ASGI scope for the connection's certificate in DER form; None without one."""
HANG_UP = "fedcg.hang_up"
"""Key in the ASGI scope for the function that ends the connection immediately."""


@contextmanager
def listening(name: str, settings: ListenerSettings, host: str, connections: Connections) -> Iterator[Listener | None]:
    """The socket of a listener, or None if it is off.

    Args:
        name: its section of coordinator.toml.
        settings: that section.
        host: the name at which devices reach it.
        connections: counts its connections.

    Raises:
        HomeError: the port is taken, or the address does not belong to this machine.
    """
    if settings.port is None:
        yield None
        return
    with bound(name, settings.address(host), settings.port, connections) as listener:
        yield listener


def bound(name: str, address: str, port: int, connections: Connections) -> Listener:
    """A listening socket.

    Raises:
        HomeError: the port is taken, or the address does not belong to this machine.
    """
    try:
        return Listener(name, address, port, connections)
    except OSError as error:
        raise HomeError(
            f"the {name} listener can't bind to {address}:{port}: {error.strerror}; stop the program on that port or "
            f"change the port under [{name}] in coordinator.toml"
        ) from error


@asynccontextmanager
async def serving(application: FastAPI, listener: Listener, context: ssl.SSLContext) -> AsyncIterator[None]:
    """Serve devices on a bound socket while the context is open."""
    config = http_config(application, listener, _identify, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
        sock=listener,
        backlog=ACCEPTS,
        ssl=context,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=HANDSHAKE_S,
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            hang_up(connection.transport)


def hang_up(transport: asyncio.Transport) -> None:
    """Abort a connection. Older releases of Python 3.11 fail on one that has just closed, because it has no protocol."""
    with suppress(AttributeError):
        transport.abort()


def peer_of(request: Request) -> x509.Certificate | None:
    """The certificate of the connection, verified by TLS; None without one."""
    der = request.scope.get(PEER)
    return x509.load_der_x509_certificate(der) if isinstance(der, bytes) else None


def _identify(transport: asyncio.Transport) -> tuple[str | None, dict[str, object]]:
    der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    name = None if der is None else enrolment_messages.common_name(x509.load_der_x509_certificate(der))
    return name, {PEER: der, HANG_UP: partial(hang_up, transport)}


ENROLMENT_THREADS = 2
"""Threads for decisions. A decision holds the members' lock, so more threads would only wait."""

RequestT = TypeVar("RequestT", bound=BaseModel)


class _RequestHandler:
    """Handles a request: limits, size, schema, decision, and a line in the event log."""

    def __init__(self, admission: Admission, limits: FailureLimits, device_limits: FailureLimits) -> None:
        self.admission = admission
        self._limits = limits
        self._device_limits = device_limits
        self._threads = anyio.CapacityLimiter(ENROLMENT_THREADS)
        self._limited = CountedEvent(admission.events, "enrolment_limited")

    async def serve(
        self, request: Request, schema: type[RequestT], grant: Callable[[RequestT], BaseModel], event: str
    ) -> Response:
        address = request.client.host if request.client is not None else "unknown"
        peer = peer_of(request)
        limits, asker = (
            (self._limits, address)
            if peer is None
            else (self._device_limits, enrolment_messages.common_name(peer) or "")
        )
        wait_s = limits.wait_s(asker)
        if wait_s > 0:
            return self._limit(address, wait_s)
        try:
            wanted = _parse(schema, await _body(request))
            answer = await anyio.to_thread.run_sync(grant, wanted, limiter=self._threads)
        except RefusedError as error:
            limits.refused(asker)
            client = "" if peer is None else asker  # unproven names are not logged
            self.admission.events.write(event, address=address, reason=str(error), client=client)
            return refusal(error.status, error.answer)
        return Response(answer.model_dump_json(), media_type="application/json")

    def _limit(self, address: str, wait_s: float) -> Response:
        self._limited.count(address=address)
        limited = too_many("refused requests", wait_s)
        return refusal(limited.status, limited.detail, limited.headers)


def create_enrolment_app(admission: Admission, limits: FailureLimits, device_limits: FailureLimits) -> FastAPI:
    """The application of the enrolment listener.

    Args:
        admission: decides on the requests.
        limits: counts refusals of connections without a certificate, by address.
        device_limits: counts refusals of devices, by name, so that requests without a certificate do not delay renewals.
    """
    handler = _RequestHandler(admission, limits, device_limits)
    application = FastAPI(title="FedCG Edge enrolment", openapi_url=None, docs_url=None, redoc_url=None)

    async def authority() -> Response:
        date = formatdate(admission.clock(), usegmt=True)  # a device checks its clock before it uses the token
        return Response(admission.authority(), media_type="application/x-pem-file", headers={"Date": date})

    async def enrol(request: Request) -> Response:
        return await handler.serve(request, enrolment_messages.EnrolRequest, admission.enrol, "enrolment_refused")

    async def renew(request: Request) -> Response:
        peer = peer_of(request)
        return await handler.serve(
            request, enrolment_messages.RenewRequest, lambda wanted: admission.renew(peer, wanted), "renewal_refused"
        )

    async def failed(request: Request, error: Exception) -> Response:
        return refusal(500, "the coordinator failed to handle the request; its log has the reason")

    application.add_exception_handler(Exception, failed)
    application.add_api_route(enrolment_messages.AUTHORITY_PATH, authority, methods=["GET"])
    application.add_api_route(enrolment_messages.ENROL_PATH, enrol, methods=["POST"])
    application.add_api_route(enrolment_messages.RENEW_PATH, renew, methods=["POST"])
    return application


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > enrolment_messages.MAX_BODY_BYTES:
            raise RefusedError(f"the request is larger than {enrolment_messages.MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


def _parse(schema: type[RequestT], body: bytes) -> RequestT:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(errors.problem_in(error), status=422) from None


MEMBER_S = 2.0
"""Interval at which a device's membership is checked during a transfer."""
REQUESTS_AT_ONCE = 4
"""Concurrent requests of one device. It uses two, and dead connections may linger."""
PIECE_BYTES = 128 * 1024
CARRIER_THREADS = 4
"""Threads that read artifacts and the register for all devices; more do not speed up one disk."""
MAX_REMEMBERED = 4096
STATUS: dict[type[errors.WireError], int] = {
    errors.TooLargeError: 413,
    errors.MalformedError: 400,
    errors.OrderError: 404,
    errors.IntegrityError: 422,
    errors.CapacityError: 503,
}

log = logging.getLogger(__name__)
ArtifactId = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


class _Fetched(StreamingResponse):
    """Pieces of an artifact. The request counts towards its device's limit until they are sent or sending fails."""

    def __init__(self, place: ExitStack, pieces: AsyncIterator[bytes], status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status, headers, "application/octet-stream")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)


class _Carrier:
    """Serves artifacts to member devices and receives their updates."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._threads = anyio.CapacityLimiter(CARRIER_THREADS)
        self._known: dict[bytes, tuple[str | None, float]] = {}
        self._busy: Counter[str] = Counter()
        self._refused = CountedEvent(coordinator.events, "carrier_refused", clock)

    async def _device(self, request: Request) -> str:
        """The device of the connection.

        Raises:
            RefusedError: the certificate does not belong to a member.
        """
        shown = request.scope[PEER]
        name, read_at = self._known.get(shown, (None, float("-inf")))
        if self._clock() - read_at >= MEMBER_S:
            name = await anyio.to_thread.run_sync(self._read, request, limiter=self._threads)
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[shown] = (name, self._clock())
        if name is None:
            raise self._refusal(request)
        return name

    def _read(self, request: Request) -> str | None:
        peer = peer_of(request)
        member = None if peer is None else member_of(self._coordinator.store, peer)
        return None if member is None else member.id

    @contextmanager
    def _occupied(self, device: str) -> Iterator[None]:
        """Count a request while it is served.

        Raises:
            RefusedError: the device has too many concurrent requests.
        """
        if self._busy[device] >= REQUESTS_AT_ONCE:
            raise RefusedError(f"{device} already has {REQUESTS_AT_ONCE} open requests; try again later", status=429)
        self._busy[device] += 1
        try:
            yield
        finally:
            self._busy[device] -= 1
            if not self._busy[device]:
                del self._busy[device]

    def _refusal(self, request: Request) -> RefusedError:
        peer = peer_of(request)
        self._refused.count(certificate=None if peer is None else enrolment_messages.common_name(peer))
        return RefusedError("this certificate does not belong to a present member; ask the operator")

    async def ready(self, request: Request) -> Response:
        """Answer 204 if the device may transfer artifacts."""
        await self._device(request)
        return Response(status_code=204)

    async def fetch(self, artifact: ArtifactId, request: Request) -> Response:
        """Serve chunks or any other range of a spec or an aggregate."""
        device = await self._device(request)
        with ExitStack() as place:
            place.enter_context(self._occupied(device))
            source = await self._source(device, artifact)
            size, wanted = source.ref.size, request.headers.get("range")
            try:
                span = chunks.Span(0, size - 1, size) if wanted is None else chunks.parse_range(wanted, size)
            except errors.TooLargeError as error:
                return refusal(416, str(error), {"Content-Range": f"bytes */{size}"})
            headers = {"Content-Length": str(span.length), "Accept-Ranges": "bytes", "ETag": f'"{artifact}"'}
            if wanted is not None:
                headers["Content-Range"] = span.content_range
            pieces = self._pieces(request, source, span)
            return _Fetched(place.pop_all(), pieces, 200 if wanted is None else 206, headers)

    async def _source(self, device: str, artifact: str) -> ChunkFile:
        published = self._coordinator.published(artifact)
        if published is None:
            raise RefusedError(f"artifact {artifact} is not available", status=404)
        try:
            return await anyio.to_thread.run_sync(published.source, artifact, limiter=self._threads)
        except (errors.IntegrityError, OSError):
            log.exception("can't read artifact %s, requested by %s", artifact, device)
            raise RefusedError("the artifact can't be read; the coordinator's log has the reason", status=500) from None

    async def _pieces(self, request: Request, source: ChunkFile, span: chunks.Span) -> AsyncIterator[bytes]:
        file = await anyio.to_thread.run_sync(os.open, source.path, os.O_RDONLY | os.O_CLOEXEC, limiter=self._threads)
        try:
            for start in range(span.first, span.last + 1, PIECE_BYTES):
                try:
                    await self._device(request)
                except RefusedError:
                    request.scope[HANG_UP]()
                    await asyncio.sleep(chunks.HTTPS_STALL_S)  # the disconnect ends this
                length = min(PIECE_BYTES, span.last + 1 - start)
                yield await anyio.to_thread.run_sync(os.pread, file, length, start, limiter=self._threads)
        finally:
            os.close(file)

    async def take(self, artifact: ArtifactId, request: Request) -> Response:
        """Receive chunks of the update that the device has announced. Each chunk is stored on arrival."""
        device = await self._device(request)
        with self._occupied(device):
            span = chunks.parse_content_range(request.headers.get("content-range", ""))
            if request.headers.get("content-length") != str(span.length):
                raise RefusedError(f"Content-Length must be {span.length}, as in Content-Range", status=400)
            for service in self._coordinator.services.values():
                ref = await asyncio.wrap_future(service.receiver.announced(device))
                if ref is not None and ref.id == artifact:
                    await self._take_chunks(service.receiver, device, request, ref, span)
                    return Response(status_code=204)
        raise errors.OrderError(f"{device} has not announced update {artifact}; announce it first")

    async def _take_chunks(
        self, receiver: Receiver, device: str, request: Request, ref: ArtifactRef, span: chunks.Span
    ) -> None:
        expected, body = span.chunks(ref), bytearray()
        index, length = next(expected)
        async for piece in request.stream():
            body += piece
            while length and len(body) >= length:
                await self._device(request)
                chunk = chunks.Chunk(ref.id, index, bytes(body[:length]))
                del body[:length]
                await asyncio.wrap_future(receiver.chunk(device, chunk))
                index, length = next(expected, (0, 0))
        if length:
            raise errors.MalformedError(f"the body ended within chunk {index}")


def create_carrier_app(coordinator: Coordinator, clock: Callable[[], float]) -> FastAPI:
    """The application of the carrier's listener.

    Args:
        coordinator: provides the artifacts and receives the updates.
        clock: monotonic seconds.
    """
    carrier = _Carrier(coordinator, clock)
    application = FastAPI(title="FedCG Edge carrier", openapi_url=None, docs_url=None, redoc_url=None)

    application.add_api_route(chunks.READY_PATH, carrier.ready, methods=["GET"])
    application.add_api_route(f"{chunks.ARTIFACTS_PATH}/{{artifact}}", carrier.fetch, methods=["GET"])
    application.add_api_route(f"{chunks.UPDATES_PATH}/{{artifact}}", carrier.take, methods=["PUT"])
    application.add_exception_handler(RefusedError, _explain)
    application.add_exception_handler(errors.WireError, _explain)
    application.add_exception_handler(ClientDisconnect, _explain)
    return application


async def _explain(request: Request, error: Exception) -> Response:
    if isinstance(error, RefusedError):
        return refusal(error.status, error.answer)
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 400)
    return refusal(status, str(error))
