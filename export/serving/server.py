"""`fedcg infer serve`: serves predictions over HTTP until a signal stops it. Doesn't import torch."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from starlette.responses import JSONResponse

from export.errors import RefusedError, ServingError
from export.serving.app import Service, create_app
from fedcg.listening import Caps, Connections, Listener, http_config, own_hosts_only

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
DRAIN_S = 30.0
"""Longest time to answer accepted requests after the signal; a body has 20 s to arrive."""
_FLUSH_S = 5
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn that answers all accepted requests after a signal, and exits normally."""

    def __init__(self, config: uvicorn.Config, service: Service, listens: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._listens = service, listens
        self._ends_at: float | None = None
        self.left_unanswered = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: refuse new requests, answer accepted ones, then stop."""
        self._service.is_draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        if self.started:
            self._listens()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second by uvicorn; true stops the server."""
        if self._service.is_draining:
            self._end_when_answered()
        return await super().on_tick(counter)

    def _end_when_answered(self) -> None:
        now = time.monotonic()
        if self._ends_at is None:
            log.info("shutting down; %d requests are unanswered", self._service.in_flight)
            self._ends_at = now + DRAIN_S
        self.left_unanswered = self._service.in_flight
        self.should_exit = self.left_unanswered == 0 or now > self._ends_at


def serve(
    service: Service, host: str, port: int, names: Sequence[str], queue: int, announce: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        service: answers the requests.
        host: address to listen on.
        port: 0 for any free port.
        names: other host names accepted in the Host header.
        queue: capacity of the service's batcher, in images.
        announce: called with one line once the server listens, with or without a usable model.

    Returns:
        The exit code: 0 if all accepted requests were answered, 1 if not.

    Raises:
        ServingError: the server cannot listen on the address.
    """
    concurrency = 2 * queue + 64  # more than the queue, so that excess requests get an error with the reason
    # Connections in between get an error with the reason; beyond, the oldest of the address with most connections is closed.
    with _bound(host, port, Connections(Caps(2 * concurrency, 2 * concurrency))) as listener:
        if host not in LOOPBACK_HOSTS:
            log.warning("%s is not a loopback address: anyone who reaches it can send requests", host)
        address, number = listener.getsockname()[:2]
        url = f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"
        config = http_config(
            own_hosts_only(create_app(service), (host, *names), "--allow-host", _refuse_host),
            listener,
            lifespan="on",
            limit_concurrency=concurrency,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        server = _Server(config, service, lambda: announce(f"listening on {url}"))
        asyncio.run(server.serve(sockets=[listener]))
    if server.left_unanswered:
        log.error("%d requests were not answered within %g s", server.left_unanswered, DRAIN_S)
    return 0 if server.started and not server.left_unanswered else 1


def _bound(host: str, port: int, connections: Connections) -> Listener:
    try:
        return Listener("infer", host, port, connections)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "stop the program that uses it, or choose another with --host and --port"
        ) from error


def _refuse_host(message: str) -> JSONResponse:
    return JSONResponse(RefusedError(400, "wrong_host", message, field="Host").as_json(), 400)
