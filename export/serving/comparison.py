"""Compares a candidate with the version in service on the same images, and judges it. Pure; no clock, no I/O.

A candidate is a version that was chosen and does not answer anybody yet. It is rejected for

* errors: `FAILURES` requests or more failed in it alone, and these are more than `FAILURE_SHARE` of all; at the end of the stage one
  is enough for the first condition;
* latency: in three of four requests it takes more than `LATENCY_FACTOR` times as long per image, and more than `LATENCY_EXTRA_S`
  longer. Both versions predict a request one directly after the other, so that other work of the box slows both; where it slows them
  a lot, a median of few requests passed these bounds for equal versions, and a quartile does not;
* drift, at the end of the stage: the shares of predicted classes differ by more than `CLASS_SHIFT` plus `CHANCE` times what is
  expected by chance, the mean confidence is lower by more than `CONFIDENCE_DROP`, or both name the same class for too few images.

Both versions see the same images, so a change of the images is no drift here, and only images with two different answers move the
shares. A better version does disagree with the one before it. How often it may follows from their accuracies a and b on held-out
images: where both hold, at least a + b - 1 of the answers are the same, because both are right there. `AGREEMENT_SLACK` is allowed
below that for harder images. A version without a stated accuracy has no such floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from export.model.runtime import Floats
from export.serving.drift_watch import (
    CHANCE,
    CLASS_SHIFT,
    CONFIDENCE_DROP,
    FAILURE_SHARE,
    FAILURES,
    Kind,
    Sample,
    Verdict,
    apart,
)

LATENCY_FACTOR = 2.0
LATENCY_EXTRA_S = 0.005
AGREEMENT_SLACK = 0.25
LEAST_TIMINGS = 20  # requests before latency is judged
LEAST_IMAGES = 20  # images before drift is judged


@dataclass(frozen=True)
class Stage:
    """How long and how much a candidate is compared.

    Attributes:
        images: compared images after which it takes all requests; at least half of them must count as independent.
        share: of the requests whose images it predicts too, in (0, 1].
        limit_s: seconds after which it takes all requests with what was compared until then.
    """

    images: int = 200
    share: float = 0.25
    limit_s: float = 3600.0


@dataclass(frozen=True)
class Pair:
    """The images of one request as both versions predicted them.

    Attributes:
        current: probabilities [N, C] of the version in service.
        current_s: seconds that it took for the N images.
        candidate: probabilities [N, C] of the candidate; None when it failed.
        candidate_s: seconds that it took.
    """

    current: Floats
    current_s: float
    candidate: Floats | None
    candidate_s: float


@dataclass(frozen=True)
class Progress:
    """What was compared until now.

    Attributes:
        images: that both versions predicted.
        agreement: share of them for which both name the same class; None without any.
        failures: requests that the candidate failed at.
    """

    images: int
    agreement: float | None
    failures: int

    def __str__(self) -> str:
        same = "" if self.agreement is None else f", {self.agreement:.0%} of them got the same class"
        return f"{self.images} images compared{same}, {self.failures} requests failed"


def least_agreement(current: float | None, candidate: float | None) -> float:
    """Share of images for which two versions of these accuracies should name the same class; 0 where one is unknown."""
    if current is None or candidate is None:
        return 0.0
    return max(0.0, current + candidate - 1 - AGREEMENT_SLACK)


class Comparison:
    """What is known of one candidate.

    Args:
        version: of the candidate.
        before: the version in service.
        stage: how much is compared.
        floor: share of images for which both should name the same class.
    """

    def __init__(self, version: str, before: str, stage: Stage, floor: float = 0.0) -> None:
        self._now, self._before = Sample(version, stage.images), Sample(before, stage.images)
        self._stage, self._floor = stage, floor
        self._times: list[tuple[float, float]] = []  # seconds per image of the version in service and of the candidate

    def progress(self) -> Progress:
        """What was compared until now."""
        images = len(self._now.predictions)
        agreement = float(np.mean(self._now.labels == self._before.labels)) if images else None
        return Progress(images, agreement, self._now.failures)

    def add(self, pair: Pair) -> None:
        """Note one compared request."""
        if pair.candidate is None:
            self._now.fail()
            return
        self._before.add(pair.current)
        self._now.add(pair.candidate)
        count = len(pair.candidate)
        self._times.append((pair.current_s / count, pair.candidate_s / count))

    def is_over(self, elapsed_s: float) -> bool:
        """Whether enough was compared, or the time is up, after so many seconds."""
        if elapsed_s >= self._stage.limit_s or self._now.is_full:
            return True
        images = len(self._now.predictions)
        is_enough = images >= self._stage.images and len(self._times) >= self._least(LEAST_TIMINGS)
        return is_enough and images * self._before.independent >= self._stage.images / 2

    def verdict(self, elapsed_s: float) -> Verdict | None:
        """Why the candidate should not take the requests; None as long as nothing speaks against it."""
        is_over = self.is_over(elapsed_s)
        found: tuple[tuple[Kind, str], ...] = (
            ("errors", self._errors(1 if is_over else FAILURES)),
            ("latency", self._slowness()),
            ("drift", self._drift() if is_over else ""),
        )
        return next((Verdict(self._now.version, kind, reason) for kind, reason in found if reason), None)

    def _least(self, count: int) -> int:
        return min(count, self._stage.images)

    def _errors(self, least: int) -> str:
        now = self._now
        if now.failures < least or now.failure_share <= FAILURE_SHARE:
            return ""
        return f"it failed at {now.failures} of {now.requests} requests that version {self._before.version} answered"

    def _slowness(self) -> str:
        if len(self._times) < self._least(LEAST_TIMINGS):
            return ""
        before, now = np.array(self._times).T
        ratio, extra_s = (float(np.quantile(one, 0.25)) for one in (now / np.maximum(before, 1e-9), now - before))
        if ratio <= LATENCY_FACTOR or extra_s <= LATENCY_EXTRA_S:
            return ""
        return (
            f"in three of four requests it takes at least {ratio:.1f} times as long per image as version {self._before.version}, and "
            f"{extra_s * 1000:.0f} ms more (of {len(now)} requests; allowed {LATENCY_FACTOR:g} times, or {LATENCY_EXTRA_S * 1000:g} ms)"
        )

    def _drift(self) -> str:
        agreement, name = self.progress().agreement, self._before.version
        if agreement is None or len(self._now.predictions) < self._least(LEAST_IMAGES):
            return ""
        shift, allowed = self._shift()
        if shift > allowed:
            told = apart(shift, allowed)
            return f"its predicted classes are {told[0]} apart from those of version {name} on the same images (allowed {told[1]})"
        if self._before.confidence - self._now.confidence > CONFIDENCE_DROP:
            return f"its confidence is {self._now.confidence:.0%} on average where version {name} has {self._before.confidence:.0%}"
        if agreement < self._floor:
            told = apart(agreement, self._floor)
            return f"it names the class of version {name} for {told[0]} of the images; with their accuracies {told[1]} are the least"
        return ""

    def _shift(self) -> tuple[float, float]:
        """How far the shares of classes are apart (half the sum of absolute differences), and how far they may be."""
        before, now = self._before.labels, self._now.labels
        moved, classes = before != now, 1 + int(max(before.max(), now.max()))
        gained, lost = (np.bincount(one[moved], minlength=classes) for one in (now, before))
        shift = float(np.abs(gained - lost).sum()) / 2 / len(now)
        # By chance each image that moved could have moved the other way: then gained - lost of a class has the variance gained + lost,
        # and half its mean absolute value is 1 / sqrt(2 pi) of its deviation. Images that repeat count once.
        by_chance = float(np.sqrt(gained + lost).sum()) / len(now) / math.sqrt(2 * math.pi * self._before.independent)
        return shift, CLASS_SHIFT + CHANCE * by_chance
