"""Evaluates a new version: as a candidate against the version in service, and in service against the previous one. Pure; no clock, no I/O.

A new version is evaluated twice, with the same measures.

**As a candidate** (`Comparison`) it is chosen but does not answer requests yet. It is rejected for

* errors: at least `FAILURES` requests failed only with the candidate, and these are more than `FAILURE_SHARE` of all. At the end of
  the stage, one failed request is enough for the first condition;
* latency: in three of four requests it takes more than `LATENCY_FACTOR` times as long per image, and more than `LATENCY_EXTRA_S`
  longer. Both versions predict a request directly after each other, so that other load slows both. Under heavy load, the median of
  a few requests exceeded these bounds for equal versions; the quartile does not;
* drift, at the end of the stage: the shares of predicted classes differ by more than `CLASS_SHIFT` plus `CHANCE` times the difference
  expected by chance, the mean confidence (probability of the likeliest class) is lower by more than `CONFIDENCE_DROP`, or both predict
  the same class for too few images.

Both versions see the same images, so a change of the images is not drift here. Only images with two different predictions change the
shares. A better version does disagree with the previous one. Their accuracies a and b on held-out images bound how often: both are
right on at least a + b - 1 of the images, so at least that share of predictions is the same. `AGREEMENT_SLACK` lowers this bound for
harder images. A version without a stated accuracy has no such bound.

**In service** (`Watch`) its predictions, from the first `window` on, are compared with the previous version's last ones, up to `LONGEST`
windows. It is rolled back for errors (beyond the previous version's share) and for drift. Here the difference of the shares is half the
sum of absolute differences.

The difference expected by chance depends on the number of independent images. A camera at a production line takes many similar images
in a row. Therefore runs of one class are counted for the previous version. Their number, divided by the number expected of independent
images, is the share of images that counts. A new version is trusted once half a window of images counts, or after `LONGEST` windows.

If the images change together with the version, a good version may be rolled back. Its improvement is lost until someone chooses it
again. If a bad version stays instead, wrong predictions are the cost. docs/research/serving.md has measured rates of both.
"""

import math
import threading
from collections import deque
from typing import Literal

import numpy as np
import numpy.typing as npt

from export.model.runtime import Floats
from fedcg.values import Value

WINDOW = 200
FAILURES = 5
FAILURE_SHARE = 0.05
CLASS_SHIFT = 0.25
CHANCE = 1.5
LONGEST = 10
CONFIDENCE_DROP = 0.2
LATENCY_FACTOR = 2.0
LATENCY_EXTRA_S = 0.005
AGREEMENT_SLACK = 0.25
LEAST_TIMINGS = 20  # requests before latency is evaluated
LEAST_IMAGES = 20  # images before drift is evaluated
Kind = Literal["errors", "drift", "latency", "incomparable"]


def apart(first: float, second: float) -> tuple[str, str]:
    """Format two shares with enough digits to show which one is larger."""
    return next(
        ((a, b) for n in range(4) if (a := f"{first:.{n}%}") != (b := f"{second:.{n}%}")), (f"{first:%}", f"{second:%}")
    )


class VersionFault(Value):
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
        """Record an answered request: probabilities [N, C] of its images."""
        self.requests += 1
        self.predictions.extend((int(row.argmax()), float(row.max())) for row in probabilities)

    def fail(self) -> None:
        """Record a request that failed."""
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
        """The share of images that counts, in (0, 1]: runs of one class, divided by the number expected of independent images."""
        labels = self.labels
        changes = int(np.count_nonzero(labels[1:] != labels[:-1]))
        by_chance = (len(labels) - 1) * (1 - float((self.shares(0) ** 2).sum()))
        return min(1.0, max(changes, 1) / max(by_chance, 1))

    @property
    def confidence(self) -> float:
        """Mean probability of the likeliest class."""
        return float(np.mean([one for _, one in self.predictions]))


def least_agreement(current: float | None, candidate: float | None) -> float:
    """Share of images for which two versions of these accuracies should predict the same class; 0 if one is unknown."""
    if current is None or candidate is None:
        return 0.0
    return max(0.0, current + candidate - 1 - AGREEMENT_SLACK)


def _drift(now: Sample, before: Sample, shift: float, by_chance: float, *, where: str = "") -> str:
    """Why the predictions of two versions differ too much; empty if they do not.

    Args:
        now: predictions of the new version.
        before: predictions of the version that it is compared with.
        shift: difference of their class shares.
        by_chance: difference expected by chance.
        where: the compared images, for the message.
    """
    allowed = CLASS_SHIFT + CHANCE * by_chance
    if shift > allowed:
        told = apart(shift, allowed)
        return f"its predicted classes differ by {told[0]} from those of version {before.version}{where} (allowed {told[1]})"
    if before.confidence - now.confidence > CONFIDENCE_DROP:
        return f"its mean confidence is {now.confidence:.0%}; version {before.version} had {before.confidence:.0%}"
    return ""


def _shift(now: Sample, before: Sample) -> tuple[float, float]:
    """Difference of the class shares on different images (half the sum of absolute differences), and the one expected by chance."""
    classes = 1 + int(max(now.labels.max(), before.labels.max()))
    ours, theirs = now.shares(classes), before.shares(classes)
    shift = float(np.abs(ours - theirs).sum()) / 2
    counts = [len(one.predictions) for one in (now, before)]
    both = (ours * counts[0] + theirs * counts[1]) / sum(counts)
    spread = sum(1 / count for count in counts) / before.independent
    # Difference expected by chance: each share's difference is nearly normal, and half its mean absolute value is 1 / sqrt(2 pi) of its
    # deviation.
    by_chance = float(np.sqrt(both * (1 - both) * spread).sum()) / math.sqrt(2 * math.pi)
    return shift, by_chance


class CandidateStage(Value):
    """Length of a candidate's comparison.

    Attributes:
        images: compared images after which the candidate takes all requests; at least half of them must count as independent.
        share: share of requests that the candidate also predicts, in (0, 1].
        limit_s: seconds after which the candidate takes all requests, even with fewer images compared.
    """

    images: int = 200
    share: float = 0.25
    limit_s: float = 3600.0


class Pair(Value):
    """Both versions' predictions for the images of one request.

    Attributes:
        current: probabilities [N, C] of the version in service.
        current_s: its seconds for the N images.
        candidate: probabilities [N, C] of the candidate; None if it failed.
        candidate_s: its seconds for the N images.
    """

    current: Floats
    current_s: float
    candidate: Floats | None
    candidate_s: float


class Progress(Value):
    """Progress of a comparison.

    Attributes:
        images: images that both versions predicted.
        agreement: share of them for which both predict the same class; None without any.
        failures: requests that failed with the candidate.
    """

    images: int
    agreement: float | None
    failures: int

    def __str__(self) -> str:
        same = "" if self.agreement is None else f", {self.agreement:.0%} of them got the same class"
        return f"{self.images} images compared{same}, {self.failures} requests failed"


class Comparison:
    """The comparison of one candidate with the version in service.

    Args:
        version: name of the candidate.
        before: name of the version in service.
        stage: length of the comparison.
        floor: least share of images for which both should predict the same class.
    """

    def __init__(self, version: str, before: str, stage: CandidateStage, floor: float = 0.0) -> None:
        self._now, self._before = Sample(version, stage.images), Sample(before, stage.images)
        self._stage, self._floor = stage, floor
        self._times: list[tuple[float, float]] = []  # seconds per image of the version in service and of the candidate

    def progress(self) -> Progress:
        """Progress so far."""
        images = len(self._now.predictions)
        agreement = float(np.mean(self._now.labels == self._before.labels)) if images else None
        return Progress(images, agreement, self._now.failures)

    def add(self, pair: Pair) -> None:
        """Add one compared request."""
        if pair.candidate is None:
            self._now.fail()
            return
        self._before.add(pair.current)
        self._now.add(pair.candidate)
        count = len(pair.candidate)
        self._times.append((pair.current_s / count, pair.candidate_s / count))

    def is_over(self, elapsed_s: float) -> bool:
        """Whether enough was compared, or the time limit is reached, after `elapsed_s` seconds."""
        if elapsed_s >= self._stage.limit_s or self._now.is_full:
            return True
        images = len(self._now.predictions)
        is_enough = images >= self._stage.images and len(self._times) >= self._least(LEAST_TIMINGS)
        return is_enough and images * self._before.independent >= self._stage.images / 2

    def verdict(self, elapsed_s: float) -> VersionFault | None:
        """Why the candidate should not serve; None while there is no reason."""
        is_over = self.is_over(elapsed_s)
        found: tuple[tuple[Kind, str], ...] = (
            ("errors", self._errors(1 if is_over else FAILURES)),
            ("latency", self._slowness()),
            ("drift", self._drift() if is_over else ""),
        )
        return next((VersionFault(self._now.version, kind, reason) for kind, reason in found if reason), None)

    def _least(self, count: int) -> int:
        return min(count, self._stage.images)

    def _errors(self, least: int) -> str:
        now = self._now
        if now.failures < least or now.failure_share <= FAILURE_SHARE:
            return ""
        return f"{now.failures} of {now.requests} requests failed that version {self._before.version} answered"

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
        agreement = self.progress().agreement
        if agreement is None or len(self._now.predictions) < self._least(LEAST_IMAGES):
            return ""
        reason = _drift(self._now, self._before, *self._shift(), where=" on the same images")
        if reason:
            return reason
        if agreement < self._floor:
            told = apart(agreement, self._floor)
            return f"it predicts the same class as version {self._before.version} for {told[0]} of the images, by accuracy at least {told[1]}"
        return ""

    def _shift(self) -> tuple[float, float]:
        """Difference of the class shares (half the sum of absolute differences), and the one expected by chance."""
        before, now = self._before.labels, self._now.labels
        moved, classes = before != now, 1 + int(max(before.max(), now.max()))
        gained, lost = (np.bincount(one[moved], minlength=classes) for one in (now, before))
        shift = float(np.abs(gained - lost).sum()) / 2 / len(now)
        # By chance, each image that moved could have moved the other way. Then gained - lost of a class has the variance gained + lost,
        # and half its mean absolute value is 1 / sqrt(2 pi) of its deviation. Repeated images count once.
        by_chance = float(np.sqrt(gained + lost).sum()) / len(now) / math.sqrt(2 * math.pi * self._before.independent)
        return shift, by_chance


class Watch:
    """Compares a version in service with the previous one; thread-safe.

    Args:
        window: number of predictions to compare; 0 for no comparison.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._trusted: Sample | None = None
        self._now: Sample | None = None
        self._judged: set[str] = set()
        self._lock = threading.Lock()  # guards the samples: one thread answers, another one reads the verdict

    def answered(self, version: str, probabilities: Floats) -> None:
        """Record an answered request: probabilities [N, C] of its images, by class name."""
        with self._lock:
            sample = self._sample(version)
            if sample is not None:
                sample.add(probabilities)

    def failed(self, version: str) -> None:
        """Record a request that failed in the model."""
        with self._lock:
            sample = self._sample(version)
            if sample is not None:
                sample.fail()

    def accept(self, version: str) -> None:
        """Stop evaluating a version: it was rolled back before, so choosing it again is deliberate."""
        self._judged.add(version)

    def verdict(self) -> VersionFault | None:
        """Why the version in service should be rolled back; returned once."""
        with self._lock:
            now, before = self._now, self._trusted
            if now is None or now.version in self._judged:
                return None
            verdict = None if before is None else self._against(now, before)
            if verdict is None and self._is_proven(now, before):
                self._trusted = now
            if verdict is not None or self._trusted is now:
                self._judged.add(now.version)
            return verdict

    def _against(self, now: Sample, before: Sample) -> VersionFault | None:
        if now.failures >= FAILURES and now.failure_share > FAILURE_SHARE + before.failure_share:
            return VersionFault(now.version, "errors", f"{now.failures} of its first {now.requests} requests failed")
        if len(now.predictions) < self.window:
            return None
        reason = _drift(now, before, *_shift(now, before))
        return VersionFault(now.version, "drift", reason) if reason else None

    def _is_proven(self, now: Sample, before: Sample | None) -> bool:
        """Whether it has enough predictions to compare the next version with it."""
        count = len(now.predictions)
        if count < self.window:
            return False
        return before is None or now.is_full or count * before.independent >= self.window / 2

    def _sample(self, version: str) -> Sample | None:
        if not self.window:
            return None
        if self._now is None or self._now.version != version:
            known = self._trusted is not None and self._trusted.version == version
            self._now = self._trusted if known else Sample(version, self.window)
        return self._now
