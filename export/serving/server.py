"""`fedcg infer serve`: answers predictions over HTTP until a signal ends it. Imports no torch."""

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
"""Longest time that accepted requests may take after the signal to end; a body has 20 s to arrive."""
_FLUSH_S = 5
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn, but a signal first lets what was accepted be answered, and ends the process normally."""

    def __init__(self, config: uvicorn.Config, service: Service, listens: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._listens = service, listens
        self._ends_at: float | None = None
        self.left_unanswered = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT: refuse what is new, answer what was accepted, then end."""
        self._service.is_draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._listens()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second by uvicorn; true ends the server."""
        if self._service.is_draining:
            self._end_when_answered()
        return await super().on_tick(counter)

    def _end_when_answered(self) -> None:
        now = time.monotonic()
        if self._ends_at is None:
            log.info("ending; %d requests are still to be answered", self._service.in_flight)
            self._ends_at = now + DRAIN_S
        self.left_unanswered = self._service.in_flight
        self.should_exit = self.left_unanswered == 0 or now > self._ends_at


def serve(
    service: Service, host: str, port: int, names: Sequence[str], queue: int, announce: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        service: answers.
        host: address to listen on.
        port: 0 takes a free one.
        names: further host names that requests may name in their Host header.
        queue: images that the service's batcher accepts.
        announce: gets one line once requests are answered, or are refused for lack of a model.

    Returns:
        The exit code: 0 when everything accepted was answered, 1 when not.

    Raises:
        ServingError: the address cannot be listened on.
    """
    concurrency = 2 * queue + 64  # beyond the queue, so that those get an answer with the reason
    # Those in between get an answer with the reason; of the address with most ends the oldest.
    with _bound(host, port, Connections(Caps(2 * concurrency, 2 * concurrency))) as listener:
        if host not in LOOPBACK_HOSTS:
            log.warning("%s is no loopback address: whoever reaches it may ask, there are no accounts", host)
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
            "end what listens there, or choose with --host and --port"
        ) from error


def _refuse_host(message: str) -> JSONResponse:
    return JSONResponse(RefusedError(400, "wrong_host", message, field="Host").as_json(), 400)
