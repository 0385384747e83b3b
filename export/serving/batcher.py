"""Micro-batches: one thread predicts waiting requests together. Independent of HTTP.

Everything except the prediction runs on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from export.errors import QueueFullError
from export.model.runtime import Floats, Sample


class Predicts(Protocol):
    """Runs a batch: a model, or a test double."""

    def predict(self, images: Sequence[Sample]) -> Floats:
        """Probabilities of images, [N, C] float32."""


Predict = Callable[[Predicts, Sequence[Sample]], Awaitable[Floats]]
"""Probabilities of images, all from this model in one batch; QueueFullError if the queue lacks space."""


@dataclass(eq=False)
class _Job:
    model: Predicts
    images: Sequence[Sample]
    answer: asyncio.Future[Floats]


class Batcher:
    """One thread that predicts waiting requests.

    A batch starts when no further request is being decoded, it is full, or its first request has waited `max_wait_s`. All requests of a
    batch use the same model.

    Args:
        max_batch: images of one batch; a request with more gets its own batch.
        max_wait_s: longest time that the first request of a batch waits for others.
        capacity: largest number of accepted, unanswered images.
        observe: called with the number of images of every batch.

    Attributes:
        length: images accepted but not answered yet.
    """

    def __init__(self, *, max_batch: int, max_wait_s: float, capacity: int, observe: Callable[[int], None]) -> None:
        self._max_batch, self._max_wait_s, self._capacity = max_batch, max_wait_s, capacity
        self._observe = observe
        self._jobs: deque[_Job] = deque()
        self.length = 0
        self._coming = 0  # places with images still being decoded
        self._is_closing = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Predict while the context lasts; requests waiting at its end are still predicted."""
        with ThreadPoolExecutor(1, "predict") as thread:
            batches = asyncio.create_task(self._run(thread))
            try:
                yield
            finally:
                self._is_closing = True
                self._changed.set()
                await batches

    @contextmanager
    def place(self) -> Iterator[Predict]:
        """Hold a place in the queue while the context lasts: for one image, until `predict` is called with more.

        Raises:
            QueueFullError: the queue is full.
        """
        self._take(1)
        taken, is_coming = 1, True
        self._coming += 1

        async def predict(model: Predicts, images: Sequence[Sample]) -> Floats:
            nonlocal taken, is_coming
            self._take(len(images) - taken)
            taken, is_coming = len(images), False
            self._coming -= 1
            job = _Job(model, images, asyncio.get_running_loop().create_future())
            self._jobs.append(job)
            self._changed.set()
            return await job.answer

        try:
            yield predict
        finally:
            self.length -= taken
            self._coming -= is_coming
            self._changed.set()

    def _take(self, images: int) -> None:
        if self.length + images > self._capacity:
            raise QueueFullError(f"{self.length} images are waiting; the limit is {self._capacity}")
        self.length += images

    async def _run(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while self._jobs or not self._is_closing:
            if not self._jobs:
                await self._change()
                continue
            deadline = loop.time() + self._max_wait_s
            while self._is_worth_waiting() and loop.time() < deadline:
                await self._change(deadline - loop.time())
            jobs = [job for job in self._batch() if not job.answer.done()]
            if jobs:
                await self._predict(jobs, thread)

    async def _change(self, longest_s: float | None = None) -> None:
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), longest_s)

    def _is_worth_waiting(self) -> bool:
        is_full = sum(len(job.images) for job in self._jobs) >= self._max_batch
        return self._coming > 0 and not is_full and not self._is_closing

    def _batch(self) -> list[_Job]:
        jobs = [self._jobs.popleft()]
        images = len(jobs[0].images)
        while self._jobs and self._jobs[0].model is jobs[0].model:
            images += len(self._jobs[0].images)
            if images > self._max_batch:
                break
            jobs.append(self._jobs.popleft())
        return jobs

    async def _predict(self, jobs: list[_Job], thread: ThreadPoolExecutor) -> None:
        images = [image for job in jobs for image in job.images]
        self._observe(len(images))
        found: Floats | Exception
        try:
            found = await asyncio.get_running_loop().run_in_executor(thread, jobs[0].model.predict, images)
        except Exception as error:  # noqa: BLE001 - a model's error is raised in the requests of its batch, and the queue continues
            found = error
        start = 0
        for job in jobs:
            stop = start + len(job.images)
            if not job.answer.done():
                if isinstance(found, Exception):
                    job.answer.set_exception(found)
                else:
                    job.answer.set_result(found[start:stop])
            start = stop
