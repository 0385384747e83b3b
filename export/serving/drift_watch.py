"""Compares a new version in service with the one before it: failures, predicted classes, confidence. Pure; no clock, no I/O.

The test: the last predictions of the version before, up to `LONGEST` windows of them, are compared with those of the new one from
its first `window` on. The new one is taken back when

* at least `FAILURES` of its requests failed inside the model, and their share exceeds that of the version before by more than
  `FAILURE_SHARE`; or
* the shares of predicted classes differ (half the sum of absolute differences) by more than `CLASS_SHIFT` plus `CHANCE` times the
  difference that is expected by chance; or
* its mean confidence (probability of the likeliest class) is lower by more than `CONFIDENCE_DROP`.

The difference that is expected by chance depends on the number of independent images. A camera on a line takes many similar images
in a row, so the runs of one class are counted for the version before: their number, divided by the number that independent images
would have, is the share of images that counts. A new version is trusted once half a window of images counts, or after `LONGEST` windows.

Images may change at the same moment as the version; then a good version is taken back, which costs its improvement until
somebody chooses it again. The opposite, a bad version that stays, costs wrong answers. How often either happens is measured in
docs/serving.md.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from export.model.runtime import Floats

WINDOW = 200
FAILURES = 5
FAILURE_SHARE = 0.05
CLASS_SHIFT = 0.25
CHANCE = 1.5
LONGEST = 10
CONFIDENCE_DROP = 0.2
Kind = Literal["errors", "drift", "latency", "incomparable"]


def apart(first: float, second: float) -> tuple[str, str]:
    """Two shares in words, with as many digits as show which one is larger."""
    return next(
        ((a, b) for n in range(4) if (a := f"{first:.{n}%}") != (b := f"{second:.{n}%}")), (f"{first:%}", f"{second:%}")
    )


@dataclass(frozen=True)
class Verdict:
    """A version that should not stay in service, and why."""

    version: str
    kind: Kind
    reason: str


class Sample:
    """The last predictions of one version."""

    def __init__(self, version: str, window: int) -> None:
        self.version = version
        self.predictions: deque[tuple[int, float]] = deque(maxlen=LONGEST * window)
        self.failures = 0
        self.requests = 0

    def add(self, probabilities: Floats) -> None:
        """Note a request that was answered: probabilities [N, C] of its images."""
        self.requests += 1
        self.predictions.extend((int(row.argmax()), float(row.max())) for row in probabilities)

    def fail(self) -> None:
        """Note a request that the version failed at."""
        self.requests += 1
        self.failures += 1

    @property
    def is_full(self) -> bool:
        """Whether further predictions replace the oldest ones."""
        return len(self.predictions) == self.predictions.maxlen

    @property
    def failure_share(self) -> float:
        """Share of requests that failed."""
        return self.failures / max(self.requests, 1)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The predicted class of each image."""
        return np.array([label for label, _ in self.predictions], dtype=np.int64)

    def shares(self, classes: int) -> npt.NDArray[np.float64]:
        """Share of each predicted class."""
        return np.bincount(self.labels, minlength=classes) / len(self.predictions)

    @property
    def independent(self) -> float:
        """The share of images that counts, in (0, 1]: runs of one class, divided by those that are expected of independent images."""
        labels = self.labels
        changes = int(np.count_nonzero(labels[1:] != labels[:-1]))
        by_chance = (len(labels) - 1) * (1 - float((self.shares(0) ** 2).sum()))
        return min(1.0, max(changes, 1) / max(by_chance, 1))

    @property
    def confidence(self) -> float:
        """Mean probability of the likeliest class."""
        return float(np.mean([one for _, one in self.predictions]))


class Watch:
    """Compares versions; all its methods are called from one thread.

    Args:
        window: predictions that are compared; 0 for no comparison.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._trusted: Sample | None = None
        self._now: Sample | None = None
        self._judged: set[str] = set()

    def answered(self, version: str, probabilities: Floats) -> None:
        """Note a request that was answered: probabilities [N, C] of its images, by class name."""
        sample = self._sample(version)
        if sample is not None:
            sample.add(probabilities)

    def failed(self, version: str) -> None:
        """Note a request that the model failed at."""
        sample = self._sample(version)
        if sample is not None:
            sample.fail()

    def accept(self, version: str) -> None:
        """Judge a version no more: it was taken back before, so whoever chooses it again means it."""
        self._judged.add(version)

    def verdict(self) -> Verdict | None:
        """What is wrong with the version in service; given once."""
        now = self._now
        if now is None or now.version in self._judged:
            return None
        before = self._trusted
        if before is not None and now.failures >= FAILURES and now.failure_share > FAILURE_SHARE + before.failure_share:
            self._judged.add(now.version)
            return Verdict(now.version, "errors", f"{now.failures} of its first {now.requests} requests failed")
        if len(now.predictions) < self.window:
            return None
        reason = "" if before is None else _drift(now, before)
        if reason:
            self._judged.add(now.version)
            return Verdict(now.version, "drift", reason)
        if before is None or now.is_full or len(now.predictions) * before.independent >= self.window / 2:
            self._judged.add(now.version)
            self._trusted = now
        return None

    def _sample(self, version: str) -> Sample | None:
        if not self.window:
            return None
        if self._now is None or self._now.version != version:
            known = self._trusted is not None and self._trusted.version == version
            self._now = self._trusted if known else Sample(version, self.window)
        return self._now


def _drift(now: Sample, before: Sample) -> str:
    """Why two samples are too different; empty when they are not."""
    classes = 1 + int(max(now.labels.max(), before.labels.max()))
    ours, theirs = now.shares(classes), before.shares(classes)
    shift = float(np.abs(ours - theirs).sum()) / 2
    counts = [len(one.predictions) for one in (now, before)]
    both = (ours * counts[0] + theirs * counts[1]) / sum(counts)
    spread = sum(1 / count for count in counts) / before.independent
    # The difference of the shares that is expected by chance: each one is nearly normal, and half its mean absolute value is
    # 1 / sqrt(2 pi) of its deviation.
    by_chance = float(np.sqrt(both * (1 - both) * spread).sum()) / math.sqrt(2 * math.pi)
    allowed = CLASS_SHIFT + CHANCE * by_chance
    if shift > allowed:
        told = apart(shift, allowed)
        return f"its predicted classes are {told[0]} apart from those of version {before.version} (allowed {told[1]})"
    if before.confidence - now.confidence > CONFIDENCE_DROP:
        return f"its confidence is {now.confidence:.0%} on average where version {before.version} had {before.confidence:.0%}"
    return ""
