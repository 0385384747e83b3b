"""Does an order that a paper states hold in our runs? Paired over seeds, and undecided within the noise.

Both runs of a pair have one seed: the same split, initial weights and order of images; what they share cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

from scipy.special import stdtrit

LEAST_SEEDS = 3
CRITERION = (
    f"An order is confirmed or refuted where the two-sided 95 % t interval of the difference per seed lies wholly on one side of 0, "
    f"from {LEAST_SEEDS} common seeds on; otherwise it is undecided. `≈` is confirmed where that interval lies within ± the margin, "
    "refuted where it lies wholly outside. Many orders are judged at once and nothing is corrected for that."
)


class Judgement(str, Enum):
    """How our runs judge an order."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """A judgement and what it rests on.

    Attributes:
        seeds: number of seeds that both rows have.
        difference: mean over seeds of higher - lower, in points; None without a common seed.
        half_width: of its 95 % interval; None below two seeds.
    """

    judgement: Judgement
    seeds: int
    difference: float | None
    half_width: float | None


def judge(lower: Mapping[int, float], higher: Mapping[int, float], margin: float | None = None) -> Verdict:
    """Judge `lower < higher`, or with a margin `lower ≈ higher`.

    Args:
        lower: accuracy in percent by seed.
        higher: likewise, of the other row.
        margin: points within which two rows count as about equal.
    """
    differences = [higher[seed] - lower[seed] for seed in sorted(lower.keys() & higher.keys())]
    count = len(differences)
    mean = fmean(differences) if differences else None
    if mean is None or count < 2:
        return Verdict(Judgement.UNDECIDED, count, mean, None)
    half = float(stdtrit(count - 1, 0.975)) * stdev(differences) / math.sqrt(count)
    if count < LEAST_SEEDS:
        return Verdict(Judgement.UNDECIDED, count, mean, half)
    return Verdict(_place(mean - half, mean + half, margin), count, mean, half)


def _place(low: float, high: float, margin: float | None) -> Judgement:
    if margin is None:
        confirmed, refuted = low > 0.0, high < 0.0
    else:
        confirmed, refuted = -margin < low and high < margin, low > margin or high < -margin
    if confirmed:
        return Judgement.CONFIRMED
    return Judgement.REFUTED if refuted else Judgement.UNDECIDED
