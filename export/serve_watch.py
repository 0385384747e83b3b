"""Whether a new version does in service what the one before it did: failures, predicted classes, confidence. Pure; no clock, no I/O.

The test: the last `window` predictions of the version before are compared with the first `window` of the new one. The new one is
taken back when

* at least `FAILURES` of its requests failed inside the model, and those are more than `FAILURE_SHARE` of them; or
* the shares of predicted classes are further apart (half the sum of absolute differences) than `CLASS_SHIFT` plus what chance
  moves with so many classes and predictions; or
* its mean confidence (probability of the likeliest class) is lower by more than `CONFIDENCE_DROP`.

Images may change at the same moment as the version; then a good version is taken back, which costs its improvement until
somebody chooses it again. The opposite, a bad version that stays, costs wrong answers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from export.runtime import Floats

WINDOW = 200
FAILURES = 5
FAILURE_SHARE = 0.05
CLASS_SHIFT = 0.25
CONFIDENCE_DROP = 0.2
Kind = Literal["errors", "drift"]


@dataclass(frozen=True)
class Verdict:
    """A version that should not stay in service, and why."""

    version: str
    kind: Kind
    reason: str


class _Sample:
    """The last predictions of one version."""

    def __init__(self, version: str, window: int) -> None:
        self.version = version
        self.predictions: deque[tuple[int, float]] = deque(maxlen=window)
        self.failures = 0
        self.requests = 0

    @property
    def confidence(self) -> float:
        return sum(one for _, one in self.predictions) / len(self.predictions)

    def shift_from(self, other: _Sample) -> float:
        """Half the sum of absolute differences of the class shares, in [0, 1]."""
        ours, theirs = (Counter(label for label, _ in one.predictions) for one in (self, other))
        return (
            sum(
                abs(ours[label] / len(self.predictions) - theirs[label] / len(other.predictions))
                for label in ours.keys() | theirs.keys()
            )
            / 2
        )


class Watch:
    """Compares versions; tell it everything from one thread.

    Args:
        window: predictions that are compared; 0 watches nothing.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._trusted: _Sample | None = None
        self._now: _Sample | None = None
        self._judged: set[str] = set()

    def heard(self, version: str, probabilities: Floats) -> None:
        """Note a request that was answered: probabilities [N, C] of its images."""
        sample = self._sample(version)
        if sample is not None:
            sample.requests += 1
            sample.predictions.extend((int(row.argmax()), float(row.max())) for row in probabilities)

    def failed(self, version: str) -> None:
        """Note a request that the model failed at."""
        sample = self._sample(version)
        if sample is not None:
            sample.requests += 1
            sample.failures += 1

    def verdict(self) -> Verdict | None:
        """What is wrong with the version in service; told once."""
        now = self._now
        if now is None or now.version in self._judged:
            return None
        if now.failures >= FAILURES and now.failures > FAILURE_SHARE * now.requests and self._trusted is not None:
            self._judged.add(now.version)
            return Verdict(now.version, "errors", f"{now.failures} of its first {now.requests} requests failed")
        if len(now.predictions) < self.window:
            return None
        self._judged.add(now.version)
        reason = "" if self._trusted is None else _drift(now, self._trusted)
        if reason:
            return Verdict(now.version, "drift", reason)
        self._trusted = now
        return None

    def _sample(self, version: str) -> _Sample | None:
        if not self.window:
            return None
        if self._now is None or self._now.version != version:
            known = self._trusted is not None and self._trusted.version == version
            self._now = self._trusted if known else _Sample(version, self.window)
        return self._now


def _drift(now: _Sample, before: _Sample) -> str:
    """Why two samples are too different; empty when they are not."""
    classes = len({label for sample in (now, before) for label, _ in sample.predictions})
    allowed = CLASS_SHIFT + math.sqrt(classes / (2 * len(now.predictions)))
    shift, drop = now.shift_from(before), before.confidence - now.confidence
    if shift > allowed:
        return f"its predicted classes are {shift:.0%} apart from those of version {before.version} (allowed {allowed:.0%})"
    if drop > CONFIDENCE_DROP:
        return f"its confidence is {now.confidence:.0%} on average where version {before.version} had {before.confidence:.0%}"
    return ""
