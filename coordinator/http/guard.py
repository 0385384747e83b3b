"""What every request to the operators' interface passes first: its address, its rate, its size; and headers of every answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from coordinator.config import LOOPBACK_HOSTS
from coordinator.http.problems import ProblemError, too_many
from coordinator.http.refusals import Rate
from coordinator.token_buckets import Buckets
from fedcg.listening import Application, network_of

MAX_BODY_BYTES = 256 * 1024
PER_ADDRESS = Rate(500, 100.0)
HEADERS = {
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}
"""Added where an answer has no such header of its own. No header lets another site read anything: CORS is off."""


class Guard:
    """An ASGI application in front of another one.

    Args:
        application: gets what passes.
        proxy: the address of the reverse proxy in front; its X-Forwarded-For is believed, and other addresses than it and loopback
            are refused.
        per_address: requests of one address.
        monotonic: seconds.
    """

    def __init__(
        self,
        application: Application,
        proxy: str | None = None,
        per_address: Rate = PER_ADDRESS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._proxy = proxy
        self._requests: Buckets[str] = Buckets(per_address.per_s, per_address.burst, monotonic)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers, sending = dict(scope["headers"]), _with_headers(send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.answer(scope["path"])(scope, receive, sending)
            return
        await self._application(scope, _bounded(receive), sending)

    def _refusal(self, scope: Any, headers: dict[bytes, bytes]) -> ProblemError | None:
        address = scope["client"][0] if scope.get("client") else "unknown"
        if self._proxy is not None and address == self._proxy:
            named = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
            scope["client"] = (address := named or address, 0)
            if headers.get(b"x-forwarded-proto") == b"https":
                scope["scheme"] = "https"
        elif self._proxy is not None and address not in LOOPBACK_HOSTS:
            return ProblemError(403, f"this interface is reached through the proxy {self._proxy} (`[api] proxy`)")
        if not self._requests.take(network_of(address)):
            return too_many("requests", self._requests.wait_s(network_of(address)))
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _too_large()
        return None


def _bounded(receive: Any) -> Any:
    taken = 0

    async def receive_bounded() -> Any:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return receive_bounded


def _too_large() -> ProblemError:
    return ProblemError(
        413, f"the body of a request has at most {MAX_BODY_BYTES} bytes", headers={"Connection": "close"}
    )


def _with_headers(send: Any) -> Any:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            own: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
            known = {name.lower() for name, _ in own}
            added = [(name, value) for name, value in HEADERS.items() if name not in known]
            message = {**message, "headers": [*own, *added]}
        await send(message)

    return send_with_headers
