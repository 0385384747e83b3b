"""The HTTPS carrier's interface for devices: spec and aggregates down by range, chunks of announced updates up. Bounded, strict.

Only what was announced over MQTT, in signed messages, is fetched or put here; grants and receipts stay there. The certificate of
the connection names the device, and the register decides whether it still may, also in the middle of a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Annotated

import anyio.to_thread
from fastapi import FastAPI, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from coordinator.errors import RefusedError
from coordinator.http.refusals import CountedEvent, refusal
from coordinator.http.tls_listeners import HANG_UP, PEER, peer_of
from coordinator.members.admission import member_of
from coordinator.service.coordinator import Coordinator
from coordinator.updates.receiver import Receiver
from fedcg.wire.errors import CapacityError, IntegrityError, MalformedError, OrderError, TooLargeError, WireError
from fedcg.wire.messages.enrolment_messages import common_name
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile
from fedcg.wire.transfer.chunks import (
    ARTIFACTS_PATH,
    HTTPS_STALL_S,
    READY_PATH,
    UPDATES_PATH,
    Chunk,
    Span,
    parse_content_range,
    parse_range,
)

MEMBER_S = 2.0
"""Interval at which the membership of a device in the middle of a transfer is checked."""
REQUESTS_AT_ONCE = 4
"""Concurrent requests of one device; it uses two, and a dead connection may linger."""
PIECE_BYTES = 128 * 1024
THREADS = 4
"""Threads that read artifacts and the register for all devices together; one disk gains nothing by more."""
MAX_REMEMBERED = 4096
STATUS: dict[type[WireError], int] = {
    TooLargeError: 413,
    MalformedError: 400,
    OrderError: 404,
    IntegrityError: 422,
    CapacityError: 503,
}

log = logging.getLogger(__name__)
ArtifactId = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


class _MemberCheck:
    """Identifies the device of a connection, and decides whether it may (still) fetch or put anything."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float], threads: anyio.CapacityLimiter) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._threads = threads
        self._members: dict[bytes, tuple[str | None, float]] = {}
        self._busy: Counter[str] = Counter()
        self._refused = CountedEvent(coordinator.events, "carrier_refused", clock)

    async def device(self, request: Request) -> str:
        """The device of the connection.

        Raises:
            RefusedError: the certificate is no member's.
        """
        shown = request.scope[PEER]
        name, read_at = self._members.get(shown, (None, float("-inf")))
        if self._clock() - read_at >= MEMBER_S:
            name = await anyio.to_thread.run_sync(self._read, request, limiter=self._threads)
            if len(self._members) >= MAX_REMEMBERED:
                self._members.clear()
            self._members[shown] = (name, self._clock())
        if name is None:
            raise self._refusal(request)
        return name

    async def is_open(self, request: Request) -> bool:
        """Whether the device of the connection is still a member, in the middle of an answer."""
        try:
            await self.device(request)
        except RefusedError:
            return False
        return True

    def _read(self, request: Request) -> str | None:
        peer = peer_of(request)
        member = None if peer is None else member_of(self._coordinator.store, peer)
        return None if member is None else member.id

    @contextmanager
    def occupied(self, device: str) -> Iterator[None]:
        """Count a request for as long as it is served.

        Raises:
            RefusedError: the device has too many.
        """
        if self._busy[device] >= REQUESTS_AT_ONCE:
            raise RefusedError(f"{device} has {REQUESTS_AT_ONCE} requests under way already", status=429)
        self._busy[device] += 1
        try:
            yield
        finally:
            self._busy[device] -= 1
            if not self._busy[device]:
                del self._busy[device]

    def _refusal(self, request: Request) -> RefusedError:
        peer = peer_of(request)
        self._refused.count(certificate=None if peer is None else common_name(peer))
        return RefusedError("this certificate is no member's (any more); ask the operator")


class _Fetched(StreamingResponse):
    """Pieces of an artifact; the request keeps its place among those of its device until they are sent, or can't be."""

    def __init__(self, place: ExitStack, pieces: AsyncIterator[bytes], status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status, headers, "application/octet-stream")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)


class _Transfers:
    """Serves fetches and takes updates."""

    def __init__(self, coordinator: Coordinator, members: _MemberCheck, threads: anyio.CapacityLimiter) -> None:
        self._coordinator = coordinator
        self._members = members
        self._threads = threads

    async def fetch(self, artifact: ArtifactId, request: Request) -> Response:
        """Whole chunks or any other range of the spec or of an aggregate."""
        device = await self._members.device(request)
        with ExitStack() as place:
            place.enter_context(self._members.occupied(device))
            source = await self._source(device, artifact)
            size, wanted = source.ref.size, request.headers.get("range")
            try:
                span = Span(0, size - 1, size) if wanted is None else parse_range(wanted, size)
            except TooLargeError as error:
                return refusal(416, str(error), {"Content-Range": f"bytes */{size}"})
            headers = {"Content-Length": str(span.length), "Accept-Ranges": "bytes", "ETag": f'"{artifact}"'}
            if wanted is not None:
                headers["Content-Range"] = span.content_range
            pieces = self._pieces(request, source, span)
            return _Fetched(place.pop_all(), pieces, 200 if wanted is None else 206, headers)

    async def _source(self, device: str, artifact: str) -> ChunkFile:
        published = self._coordinator.published(artifact)
        if published is None:
            raise RefusedError(f"there is no artifact {artifact} to fetch", status=404)
        try:
            return await anyio.to_thread.run_sync(published.source, artifact, limiter=self._threads)
        except (IntegrityError, OSError):
            log.exception("%s asked for artifact %s, which can't be read", device, artifact)
            raise RefusedError("the artifact can't be read; the coordinator's log has the reason", status=500) from None

    async def _pieces(self, request: Request, source: ChunkFile, span: Span) -> AsyncIterator[bytes]:
        file = await anyio.to_thread.run_sync(os.open, source.path, os.O_RDONLY | os.O_CLOEXEC, limiter=self._threads)
        try:
            for start in range(span.first, span.last + 1, PIECE_BYTES):
                if not await self._members.is_open(request):
                    request.scope[HANG_UP]()
                    await asyncio.sleep(HTTPS_STALL_S)  # ended by the disconnect
                length = min(PIECE_BYTES, span.last + 1 - start)
                yield await anyio.to_thread.run_sync(os.pread, file, length, start, limiter=self._threads)
        finally:
            os.close(file)

    async def take(self, artifact: ArtifactId, request: Request) -> Response:
        """Chunks of the update that the device has announced; each counts as soon as it is here."""
        device = await self._members.device(request)
        with self._members.occupied(device):
            span = parse_content_range(request.headers.get("content-range", ""))
            if request.headers.get("content-length") != str(span.length):
                raise RefusedError(f"Content-Length must be {span.length}, as in Content-Range", status=400)
            for service in self._coordinator.services.values():
                ref = await asyncio.wrap_future(service.receiver.announced(device))
                if ref is not None and ref.id == artifact:
                    await self._take_chunks(service.receiver, device, request, ref, span)
                    return Response(status_code=204)
        raise OrderError(f"no update {artifact} of {device} is under way; announce it first")

    async def _take_chunks(
        self, receiver: Receiver, device: str, request: Request, ref: ArtifactRef, span: Span
    ) -> None:
        chunks, body = span.chunks(ref), bytearray()
        index, length = next(chunks)
        async for piece in request.stream():
            body += piece
            while length and len(body) >= length:
                await self._members.device(request)
                chunk = Chunk(ref.id, index, bytes(body[:length]))
                del body[:length]
                await asyncio.wrap_future(receiver.chunk(device, chunk))
                index, length = next(chunks, (0, 0))
        if length:
            raise MalformedError(f"the body ended in the middle of chunk {index}")


def create_carrier_app(coordinator: Coordinator, clock: Callable[[], float]) -> FastAPI:
    """The application of the carrier's listener.

    Args:
        coordinator: has the artifacts to fetch, and takes updates.
        clock: monotonic seconds.
    """
    threads = anyio.CapacityLimiter(THREADS)
    members = _MemberCheck(coordinator, clock, threads)
    transfers = _Transfers(coordinator, members, threads)
    application = FastAPI(title="FedCG Edge carrier", openapi_url=None, docs_url=None, redoc_url=None)

    async def ready(request: Request) -> Response:
        await members.device(request)
        return Response(status_code=204)

    application.add_api_route(READY_PATH, ready, methods=["GET"])
    application.add_api_route(f"{ARTIFACTS_PATH}/{{artifact}}", transfers.fetch, methods=["GET"])
    application.add_api_route(f"{UPDATES_PATH}/{{artifact}}", transfers.take, methods=["PUT"])
    application.add_exception_handler(RefusedError, _explain)
    application.add_exception_handler(WireError, _explain)
    application.add_exception_handler(ClientDisconnect, _explain)
    return application


async def _explain(request: Request, error: Exception) -> Response:
    if isinstance(error, RefusedError):
        return refusal(error.status, error.answer)
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 400)
    return refusal(status, str(error))
