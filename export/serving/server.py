"""`fedcg infer serve`: answers predictions over HTTP until a signal ends it. Imports no torch."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.responses import JSONResponse

from export.errors import RefusedError, ServingError
from export.model.manifest import Accept
from export.serving.app import Metrics, Service, create_app
from export.serving.batcher import Batcher
from export.serving.judge import WINDOW, Stage
from export.serving.live_model import ServedModel
from export.serving.request_bodies import Limits
from fedcg.imaging import MAX_PIXELS
from fedcg.listening import Caps, Connections, Listener, http_config, own_hosts_only

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
DRAIN_S = 30.0
"""Longest time that accepted requests may take after the signal to end; a body has 20 s to arrive."""
_FLUSH_S = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        model: a model's directory, or the root of its versions.
        host: address to listen on.
        port: 0 takes a free one.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        max_batch: images that are predicted together, and (where the queue takes them) images of one request.
        max_wait_ms: longest time that a request waits for others to join its batch.
        queue: images that may be accepted and not answered yet.
        max_bytes: bytes of a request's body.
        max_pixels: pixels of an encoded image.
        stage: how a new version is compared before it takes the requests; None: it takes them at once.
        watch: predictions by which a new version is compared with the one before it; 0 for never.
        names: further host names that requests may name in their Host header.
        accept: what a version's manifest must pass, e.g. the check of its signature; None for nothing.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 8080
    threads: int = 1
    max_batch: int = 32
    max_wait_ms: float = 2.0
    queue: int = 256
    max_bytes: int = 16 * 1024 * 1024
    max_pixels: int = MAX_PIXELS
    watch: int = WINDOW
    stage: Stage | None = field(default_factory=Stage)
    names: tuple[str, ...] = ()
    accept: Accept | None = None


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


def serve(settings: Settings, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: how.
        announce: gets one line once requests are answered, or are refused for lack of a model.

    Returns:
        The exit code: 0 when everything accepted was answered, 1 when not.

    Raises:
        ServingError: the address cannot be listened on.
    """
    metrics = Metrics()
    limits = Limits(settings.max_bytes, settings.max_pixels, min(settings.max_batch, settings.queue))
    batcher = Batcher(
        max_batch=settings.max_batch,
        max_wait_s=settings.max_wait_ms / 1000,
        capacity=settings.queue,
        observe=metrics.batches.observe,
    )

    def count(outcome: str) -> None:
        metrics.loads.labels(outcome).inc()

    models = ServedModel(
        settings.model,
        threads=settings.threads,
        warm_up=(1, settings.max_batch),
        observe=count,
        accept=settings.accept,
        stage=settings.stage,
        watch=settings.watch,
    )
    service = Service(models, batcher, limits, metrics)
    # Those in between get an answer with the reason; of the address with most ends the oldest.
    room = 2 * _concurrency(settings)
    with _bound(settings, Connections(Caps(room, room))) as listener:
        if settings.host not in LOOPBACK_HOSTS:
            log.warning("%s is no loopback address: whoever reaches it may ask, there are no accounts", settings.host)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _Server(_config(service, settings, listener), service, lambda: announce(f"listening on {url}"))
        asyncio.run(server.serve(sockets=[listener]))
    if server.left_unanswered:
        log.error("%d requests were not answered within %g s", server.left_unanswered, DRAIN_S)
    return 0 if server.started and not server.left_unanswered else 1


def _config(service: Service, settings: Settings, listener: Listener) -> uvicorn.Config:
    names = (settings.host, *settings.names)
    return http_config(
        own_hosts_only(create_app(service), names, "--allow-host", _refuse_host),
        listener,
        lifespan="on",
        limit_concurrency=_concurrency(settings),
        timeout_graceful_shutdown=_FLUSH_S,
    )


def _concurrency(settings: Settings) -> int:
    return 2 * settings.queue + 64  # beyond the queue, so that those get an answer with the reason


def _bound(settings: Settings, connections: Connections) -> Listener:
    try:
        return Listener("infer", settings.host, settings.port, connections)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "end what listens there, or choose with --host and --port"
        ) from error


def _refuse_host(message: str) -> JSONResponse:
    return JSONResponse(RefusedError(400, "wrong_host", message, field="Host").as_json(), 400)
