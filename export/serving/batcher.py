"""Micro-batches: requests that wait at the same time are predicted together, by one thread. Knows nothing of HTTP.

Places are taken and given back on the event loop's thread; the predicting thread only takes jobs and hands back answers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from export.errors import ExportError
from export.model.runtime import Floats
from fedcg.imaging import Pixels


class Predicts(Protocol):
    """What runs a batch: a model, or a test's stand-in."""

    def predict(self, images: Sequence[Pixels]) -> Floats:
        """Probabilities of images, [N, C] float32."""


class QueueFullError(ExportError):
    """As many images wait as the queue takes."""


@dataclass(eq=False)
class _Job:
    model: Predicts
    images: Sequence[Pixels]
    answer: asyncio.Future[Floats]


class Place:
    """A request's share of the queue, one image until it says how many it has."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._images = 1
        self._is_coming = True

    async def predict(self, model: Predicts, images: Sequence[Pixels]) -> Floats:
        """Probabilities of images, all from this model and all in one batch.

        Raises:
            QueueFullError: so many images do not fit in.
        """
        self._batcher._take(len(images) - self._images)  # noqa: SLF001 - a place is part of its batcher
        self._images = len(images)
        self._is_coming = False
        return await self._batcher._answer(model, images)  # noqa: SLF001

    def _leave(self) -> None:
        self._batcher._give_back(self._images, was_coming=self._is_coming)  # noqa: SLF001


class Batcher:
    """One thread that predicts what waits.

    A batch starts as soon as nobody else is about to join it, it is full, or its first request has waited long enough. Requests
    whose models differ are never in one batch.

    Args:
        max_batch: images of one batch; a request with more has a batch of its own.
        max_wait_s: longest time that the first request of a batch waits for others.
        capacity: images that may be accepted and not answered yet.
        observe: told the images of every batch, on the predicting thread.
    """

    def __init__(self, *, max_batch: int, max_wait_s: float, capacity: int, observe: Callable[[int], None]) -> None:
        self._max_batch, self._max_wait_s, self._capacity = max_batch, max_wait_s, capacity
        self._observe = observe
        self._jobs: deque[_Job] = deque()
        self._waiting = 0  # images of `_jobs`
        self._taken = 0  # images that have a place
        self._coming = 0  # places whose images are not there yet
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="predict", daemon=True)

    @property
    def length(self) -> int:
        """Images that were accepted and are not answered yet."""
        return self._taken

    def start(self) -> None:
        """Begin to predict."""
        self._thread.start()

    def close(self) -> None:
        """Predict what still waits, then end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place in the queue for as long as the context lasts.

        Raises:
            QueueFullError: there is none.
        """
        self._take(1)
        with self._changed:
            self._coming += 1
        place = Place(self)
        try:
            yield place
        finally:
            place._leave()  # noqa: SLF001 - a place is part of its batcher

    def _take(self, images: int) -> None:
        if self._taken + images > self._capacity:
            raise QueueFullError(f"{self._taken} images wait already, and the queue takes {self._capacity}")
        self._taken += images

    def _give_back(self, images: int, *, was_coming: bool) -> None:
        self._taken -= images
        if was_coming:
            with self._changed:
                self._coming -= 1
                self._changed.notify()

    async def _answer(self, model: Predicts, images: Sequence[Pixels]) -> Floats:
        job = _Job(model, images, asyncio.get_running_loop().create_future())
        with self._changed:
            self._coming -= 1
            self._jobs.append(job)
            self._waiting += len(images)
            self._changed.notify()
        return await job.answer

    def _run(self) -> None:
        while (jobs := self._next()) is not None:
            live = [job for job in jobs if not job.answer.cancelled()]
            if live:
                self._predict(live)

    def _next(self) -> list[_Job] | None:
        with self._changed:
            while not self._jobs:
                if self._is_closing:
                    return None
                self._changed.wait()
            deadline = time.monotonic() + self._max_wait_s
            while self._coming and self._waiting < self._max_batch and not self._is_closing:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._batch()

    def _batch(self) -> list[_Job]:
        jobs = [self._jobs.popleft()]
        images = len(jobs[0].images)
        while self._jobs and self._jobs[0].model is jobs[0].model:
            if images + len(self._jobs[0].images) > self._max_batch:
                break
            jobs.append(self._jobs.popleft())
            images += len(jobs[-1].images)
        self._waiting -= images
        return jobs

    def _predict(self, jobs: list[_Job]) -> None:
        images = [image for job in jobs for image in job.images]
        self._observe(len(images))
        found: Floats | Exception
        try:
            found = jobs[0].model.predict(images)
        except Exception as error:  # noqa: BLE001 - whatever a model raises belongs to those who asked, not to the thread
            found = error
        # A loop that was closed meanwhile has nobody left to answer to.
        loop = jobs[0].answer.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, jobs, found)


def _deliver(jobs: list[_Job], found: Floats | Exception) -> None:
    start = 0
    for job in jobs:
        stop = start + len(job.images)
        if not job.answer.done():
            if isinstance(found, np.ndarray):
                job.answer.set_result(found[start:stop])
            else:
                job.answer.set_exception(found)
        start = stop
