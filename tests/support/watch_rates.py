"""How often the server rolls a good version back, and how many predictions a bad one makes before its rollback; with seeded streams."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from export.model.runtime import Floats
from export.serving.judge import LONGEST, WINDOW, VersionFault, Watch

Shares = npt.NDArray[np.float64]
LOOK = 25
TEN = np.full(10, 0.1)
TWO = np.array([0.9, 0.1])
HUNDRED = np.full(100, 0.01)


@dataclass(frozen=True)
class Traffic:
    """The behaviour of a version on incoming images.

    Attributes:
        shares: of the predicted classes.
        run: average number of consecutive images of one class; 1: each is drawn separately.
        confidence: mean probability of the likeliest class.
        failing: share of requests that fail.
    """

    shares: Shares
    run: float = 1.0
    confidence: float = 0.9
    failing: float = 0.0

    def rows(self, count: int, random: np.random.Generator) -> Floats:
        """Return probabilities of `count` images, [count, classes]."""
        fresh = random.random(count) < 1 / self.run
        fresh[0] = True
        drawn = random.choice(len(self.shares), size=count, p=self.shares)
        labels = drawn[np.maximum.accumulate(np.where(fresh, np.arange(count), 0))]
        sure = random.beta(20 * self.confidence, 20 * (1 - self.confidence), count)
        sure = np.maximum(sure, 1.01 / len(self.shares))
        rows = np.repeat(((1 - sure) / (len(self.shares) - 1))[:, None], len(self.shares), axis=1)
        rows[np.arange(count), labels] = sure
        return rows.astype(np.float32)


def swap(before: Traffic, after: Traffic, random: np.random.Generator) -> tuple[VersionFault | None, int]:
    """Simulate one change of versions, checked twice a second at 50 requests per second: the verdict, and its number of requests."""
    watch, requests = Watch(WINDOW), LONGEST * WINDOW
    watch.answered("0001", before.rows(requests, random))
    assert watch.verdict() is None
    rows = after.rows(requests, random)
    failed = random.random(requests) < after.failing
    for start in range(0, requests, LOOK):
        for number in range(start, start + LOOK):
            if failed[number]:
                watch.failed("0002")
            else:
                watch.answered("0002", rows[number : number + 1])
        verdict = watch.verdict()
        if verdict is not None:
            return verdict, start + LOOK
    return None, requests


def taken_back(before: Traffic, after: Traffic, swaps: int, seed: int = 0) -> tuple[float, float]:
    """Return the share of changes that are rolled back, and the median requests before that (nan without any)."""
    random = np.random.default_rng(seed)
    taken = [requests for verdict, requests in (swap(before, after, random) for _ in range(swaps)) if verdict]
    return len(taken) / swaps, float(np.median(taken)) if taken else float("nan")


def collapsed(shares: Shares, part: float) -> Shares:
    """Predict the least frequent class for a part of the images of all others."""
    moved = shares * (1 - part)
    moved[int(shares.argmin())] += part
    return moved


TRAFFIC = {
    f"{name}, {how}": Traffic(shares, run)
    for name, shares in (("2 classes, 90 : 10", TWO), ("10 classes", TEN), ("100 classes", HUNDRED))
    for how, run in (("each image for itself", 1.0), ("in runs of 5", 5.0), ("in runs of 20", 20.0))
}
DAMAGE: dict[str, Callable[[Traffic], Traffic]] = {
    "one class for every image": lambda one: replace(one, shares=collapsed(one.shares, 1.0)),
    "one class for three quarters": lambda one: replace(one, shares=collapsed(one.shares, 0.75)),
    "one class for half": lambda one: replace(one, shares=collapsed(one.shares, 0.5)),
    "one class for a third": lambda one: replace(one, shares=collapsed(one.shares, 0.33)),
    "confidence 70% for 90%": lambda one: replace(one, confidence=0.7),
    "confidence 65% for 90%": lambda one: replace(one, confidence=0.65),
    "3% of requests fail": lambda one: replace(one, failing=0.03),
    "10% of requests fail": lambda one: replace(one, failing=0.1),
    "every request fails": lambda one: replace(one, failing=1.0),
}
