"""The HTTPS interface for devices: the authority's certificate, enrolment by token, renewal. Bounded, strict, rate-limited.

It is another application than the operator's interface (`api`), on another port, and has none of its routes.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from typing import TypeVar

import anyio.to_thread
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from coordinator.errors import RefusedError
from coordinator.http.refusals import CountedEvent, FailureLimits, refusal
from coordinator.http.tls_listeners import peer_of
from coordinator.members.admission import Admission
from fedcg.wire.errors import problem_in
from fedcg.wire.messages.enrolment_messages import (
    AUTHORITY_PATH,
    ENROL_PATH,
    MAX_BODY_BYTES,
    RENEW_PATH,
    EnrolRequest,
    RenewRequest,
    common_name,
)

THREADS = 2
"""Threads that decide; a decision holds the lock of the members, so more threads would only wait."""

RequestT = TypeVar("RequestT", bound=BaseModel)


class _RequestHandler:
    """Handles a request: limits, bounds, schema, decision, and a line in the event log."""

    def __init__(self, admission: Admission, limits: FailureLimits, device_limits: FailureLimits) -> None:
        self.admission = admission
        self._limits = limits
        self._device_limits = device_limits
        self._threads = anyio.CapacityLimiter(THREADS)
        self._limited = CountedEvent(admission.events, "enrolment_limited")

    async def serve(
        self, request: Request, schema: type[RequestT], grant: Callable[[RequestT], BaseModel], event: str
    ) -> Response:
        address = request.client.host if request.client is not None else "unknown"
        peer = peer_of(request)
        limits, asker = (self._limits, address) if peer is None else (self._device_limits, common_name(peer) or "")
        wait_s = limits.wait_s(asker)
        if wait_s > 0:
            return self._limit(address, wait_s)
        try:
            wanted = _parse(schema, await _body(request))
            answer = await anyio.to_thread.run_sync(grant, wanted, limiter=self._threads)
        except RefusedError as error:
            limits.refused(asker)
            client = "" if peer is None else asker  # a name that nobody has proved is in no log
            self.admission.events.write(event, address=address, reason=str(error), client=client)
            return refusal(error.status, error.answer)
        return Response(answer.model_dump_json(), media_type="application/json")

    def _limit(self, address: str, wait_s: float) -> Response:
        self._limited.count(address=address)
        seconds = int(wait_s) + 1
        return refusal(429, f"too many refused requests; try again in {seconds} s", {"Retry-After": str(seconds)})


def create_enrolment_app(admission: Admission, limits: FailureLimits, device_limits: FailureLimits) -> FastAPI:
    """The application of the enrolment listener.

    Args:
        admission: decides.
        limits: counts refusals of connections without a certificate, by address.
        device_limits: counts those of devices, by name, so that requests without a certificate delay no renewal.
    """
    handler = _RequestHandler(admission, limits, device_limits)
    application = FastAPI(title="FedCG Edge enrolment", openapi_url=None, docs_url=None, redoc_url=None)

    async def authority() -> Response:
        date = formatdate(admission.clock(), usegmt=True)  # a box compares its clock before it uses the token
        return Response(admission.authority(), media_type="application/x-pem-file", headers={"Date": date})

    async def enrol(request: Request) -> Response:
        return await handler.serve(request, EnrolRequest, admission.enrol, "enrolment_refused")

    async def renew(request: Request) -> Response:
        peer = peer_of(request)
        return await handler.serve(
            request, RenewRequest, lambda wanted: admission.renew(peer, wanted), "renewal_refused"
        )

    async def failed(request: Request, error: Exception) -> Response:
        return refusal(500, "the coordinator could not do it; its log has the reason")

    application.add_exception_handler(Exception, failed)
    application.add_api_route(AUTHORITY_PATH, authority, methods=["GET"])
    application.add_api_route(ENROL_PATH, enrol, methods=["POST"])
    application.add_api_route(RENEW_PATH, renew, methods=["POST"])
    return application


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(f"a request has at most {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


def _parse(schema: type[RequestT], body: bytes) -> RequestT:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(problem_in(error), status=422) from None
