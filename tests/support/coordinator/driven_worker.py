"""The aggregation worker's handle, driven as the service's loop does it."""

import contextlib
import queue
import time
from typing import Any

from typing_extensions import Self

from coordinator.aggregation.jobs import WorkerEvent, WorkerSettings
from coordinator.aggregation.worker_handle import AggregationWorker

DEADLINE_S = 60.0


class DrivenWorker:
    """Collects what the worker's replies mean."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.events: list[WorkerEvent] = []
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worker = AggregationWorker(settings, self._replies.put)

    def __enter__(self) -> Self:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    def until(self, *kinds: type[WorkerEvent]) -> Any:
        """Go on until an event of one of these kinds came, and return it."""
        end = time.monotonic() + DEADLINE_S
        while not any(isinstance(event, kinds) for event in self.events):
            assert time.monotonic() < end, self.events
            self.worker.tick()
            try:
                self.events += self.worker.follow(self._replies.get(timeout=0.05))
            except queue.Empty:
                continue
        return next(event for event in self.events if isinstance(event, kinds))

    def drain(self, seconds: float) -> None:
        """Go on for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.worker.tick()
            with contextlib.suppress(queue.Empty):
                self.events += self.worker.follow(self._replies.get(timeout=min(left, 0.05)))
