"""Runs a candidate beside the version in service, on images that were answered already: one thread, bounded, never in a caller's way."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone

import numpy as np

from export.model.runtime import Floats, Model
from export.serving.judge import Comparison, Pair, Progress, Stage, Verdict, least_agreement
from fedcg.imaging import Pixels

PENDING = 2
"""Requests whose images are kept for the comparison, the one in work included; further ones are left out."""
_FAILED = "version %s failed in the comparison (further failures are not logged): %s"
log = logging.getLogger(__name__)


def is_comparable(model: Model, current: Model) -> bool:
    """Whether two models take the same pixels and name the same classes.

    In another order they may give every class another's name and still predict the same shares of classes: that shows only where their
    accuracies say how often both should agree.
    """
    forms = [
        (sorted(one.manifest.classes), one.manifest.image.mode, one.manifest.image.shape) for one in (model, current)
    ]
    is_same_order = model.manifest.classes == current.manifest.classes
    return forms[0] == forms[1] and (is_same_order or _floor(model, current) > 0)


def _floor(model: Model, current: Model) -> float:
    return least_agreement(*(one.manifest.verification.accuracy_onnx for one in (current, model)))


class Candidate:
    """A version that was chosen, while it is compared with the one in service.

    `offer` and `as_json` may be called by any thread; `verdict` and `is_over` belong to the one that refreshes the served model.

    Args:
        model: the candidate, ready to run.
        current: the model in service; comparable.
        stage: how much is compared.
        began_s: when the stage began, as `clock` has it.
        clock: seconds of a steady clock.
        chance: a number in [0, 1) for each request; below the stage's share the request is compared.
    """

    def __init__(
        self,
        model: Model,
        current: Model,
        stage: Stage,
        began_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.model, self._current, self._stage = model, current, stage
        self._began_s, self._clock, self._chance = began_s, clock, chance
        self.since = datetime.now(timezone.utc)
        self.progress = Progress(0, None, 0)
        """What was compared until the last look; changes in one step."""
        self._comparison = Comparison(model.version, current.version, stage, _floor(model, current))
        self._pairs: deque[Pair] = deque()  # from the thread to whoever asks for the verdict
        self._room = threading.BoundedSemaphore(PENDING)
        self._thread = ThreadPoolExecutor(1, "candidate")
        self._is_turned = self._has_failed = False

    def offer(self, served: Model, images: Sequence[Pixels]) -> None:
        """Compare images that `served` has answered, if they are in the share and the thread is free; returns at once."""
        if served is not self._current or self._chance() >= self._stage.share or not self._room.acquire(blocking=False):
            return
        try:
            self._thread.submit(self._compare, images)
        except RuntimeError:  # closed a moment ago
            self._room.release()

    def verdict(self) -> Verdict | None:
        """Why it should not take the requests, by what was compared until now."""
        while self._pairs:
            self._comparison.add(self._pairs.popleft())
        self.progress = self._comparison.progress()
        return self._comparison.verdict(self._elapsed_s())

    def is_over(self) -> bool:
        """Whether enough was compared, or the time is up."""
        return self._comparison.is_over(self._elapsed_s())

    def close(self) -> None:
        """Compare nothing further; does not wait for what is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def as_json(self) -> dict[str, object]:
        """The stage as `/model` shows it."""
        stage = {"since": self.since.isoformat(), "of_images": self._stage.images}
        return {**self.model.identity(), **stage, **asdict(self.progress)}

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _compare(self, images: Sequence[Pixels]) -> None:
        """On the thread: both versions one directly after the other, each first in turn, so that both meet the same other work."""
        try:
            self._is_turned = not self._is_turned
            if self._is_turned:
                candidate, candidate_s = self._predicted(self.model, images)
                current, current_s = self._predicted(self._current, images)
            else:
                current, current_s = self._predicted(self._current, images)
                candidate, candidate_s = self._predicted(self.model, images)
            if current is not None:
                self._pairs.append(Pair(current, current_s, candidate, candidate_s))
        finally:
            self._room.release()

    def _predicted(self, model: Model, images: Sequence[Pixels]) -> tuple[Floats | None, float]:
        """Probabilities by class name, and seconds; None when the model fails or gives values that are not numbers."""
        began = self._clock()
        try:
            rows = model.predict(images)
        except Exception as error:  # noqa: BLE001 - onnxruntime's own exception types are not public, and whatever it is counts
            log.log(logging.DEBUG if self._has_failed else logging.WARNING, _FAILED, model.version, error)
            self._has_failed = True
            return None, self._clock() - began
        return (model.by_name(rows) if np.isfinite(rows).all() else None), self._clock() - began
