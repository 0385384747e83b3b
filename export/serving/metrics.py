"""What the server counts, in Prometheus' text format.

Written here and not with prometheus_client: a handful of series is less code than a dependency on every box that predicts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Labels = Mapping[str, str]


class Histogram:
    """Counts of values up to each bound.

    Args:
        bounds: upper bounds, rising; what is above the last is counted in the total alone.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value; safe from any thread."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The samples of this histogram."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            seen += count
            yield sample(f"{name}_bucket", {"le": bound}, seen)
        yield sample(f"{name}_sum", {}, round(total, 6))
        yield sample(f"{name}_count", {}, seen)


class Metrics:
    """All that is counted over the life of one server. Counters belong to the event loop's thread, histograms to any."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter()
        self.rollbacks: Counter[str] = Counter()
        self.seconds = Histogram(SECONDS)
        self.batches = Histogram(IMAGES)

    def text(self, *, queue: int, is_ready: bool, identity: Labels | None) -> str:
        """The whole page.

        Args:
            queue: images that are accepted and not answered yet.
            is_ready: whether predictions are answered.
            identity: labels that name the model in service; None without one.
        """
        return "\n".join([*self._lines(queue, is_ready=is_ready, identity=identity), ""])

    def _lines(self, queue: int, *, is_ready: bool, identity: Labels | None) -> Iterator[str]:
        yield from _counter(
            "fedcg_serve_requests_total", "Requests for predictions by outcome.", "outcome", self.requests
        )
        yield from _head(
            "fedcg_serve_request_seconds", "Seconds from a request's first byte to its answer.", "histogram"
        )
        yield from self.seconds.lines("fedcg_serve_request_seconds")
        yield from _head("fedcg_serve_batch_images", "Images that were predicted together.", "histogram")
        yield from self.batches.lines("fedcg_serve_batch_images")
        yield from _counter("fedcg_serve_predictions_total", "Images by likeliest class.", "class", self.classes)
        yield from _counter("fedcg_serve_model_loads_total", "New versions by outcome.", "outcome", self.swaps)
        yield from _counter(
            "fedcg_serve_rollbacks_total", "Versions taken back for what they did.", "reason", self.rollbacks
        )
        yield from _gauge("fedcg_serve_queue_images", "Images accepted and not answered yet.", [({}, queue)])
        yield from _gauge("fedcg_serve_ready", "1 while predictions are answered.", [({}, int(is_ready))])
        yield from _gauge("fedcg_serve_model_info", "The model in service.", [(identity, 1)] if identity else [])


def sample(name: str, labels: Labels, value: float) -> str:
    """One line of the format."""
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value}" if told else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _head(name: str, told: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {told}", f"# TYPE {name} {kind}"


def _counter(name: str, told: str, label: str, counts: Mapping[str, int]) -> Iterator[str]:
    yield from _head(name, told, "counter")
    for value, count in sorted(counts.items()):
        yield sample(name, {label: value}, count)


def _gauge(name: str, told: str, values: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    yield from _head(name, told, "gauge")
    for labels, value in values:
        yield sample(name, labels, value)
