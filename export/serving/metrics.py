"""The counters of the server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
IDENTITY = ("federation", "round", "version", "sha256")


class Metrics:
    """All counters of one server; safe from any thread."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "fedcg_serve_requests", "Requests for predictions by outcome.", ["outcome"], registry=registry
        )
        self.seconds = Histogram(
            "fedcg_serve_request_seconds",
            "Seconds from a request's first byte to its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self.batches = Histogram(
            "fedcg_serve_batch_images", "Images that were predicted together.", buckets=IMAGES, registry=registry
        )
        self.classes = Counter("fedcg_serve_predictions", "Images by likeliest class.", ["class"], registry=registry)
        self.loads = Counter("fedcg_serve_model_loads", "New versions by outcome.", ["outcome"], registry=registry)
        self.rollbacks = Counter(
            "fedcg_serve_rollbacks", "Versions taken back, by reason.", ["reason"], registry=registry
        )
        self._queue = Gauge("fedcg_serve_queue_images", "Images accepted and not answered yet.", registry=registry)
        self._ready = Gauge("fedcg_serve_ready", "1 while predictions are answered.", registry=registry)
        self._model = Gauge("fedcg_serve_model_info", "The model in service.", IDENTITY, registry=registry)
        self._candidate = Gauge(
            "fedcg_serve_candidate_images", "Images a new version was compared on.", ["version"], registry=registry
        )

    def text(
        self, *, queue: int, is_ready: bool, identity: Mapping[str, str] | None, candidate: tuple[str, int] | None
    ) -> bytes:
        """The whole page.

        Args:
            queue: images that are accepted and not answered yet.
            is_ready: whether predictions are answered.
            identity: `IDENTITY` of the model in service; None without one.
            candidate: version of the candidate, and the images that it was compared on; None without one.
        """
        self._queue.set(queue)
        self._ready.set(is_ready)
        self._model.clear()
        if identity is not None:
            self._model.labels(**identity).set(1)
        self._candidate.clear()
        if candidate is not None:
            version, images = candidate
            self._candidate.labels(version).set(images)
        return generate_latest(self._registry)
