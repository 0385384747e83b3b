"""Confidence intervals, and how well scores separate members from non-members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, rankdata
from sklearn.metrics import roc_curve

from audit.measures.figures import CONFIDENCE, Interval

_RESAMPLES = 1000
Values = NDArray[np.float64]


def proportion(successes: int, trials: int) -> Interval:
    """A share with its Clopper-Pearson interval; trials >= 1."""
    bounds = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def bootstrap(
    values: Values, seed: int, statistic: Callable[[Values], float] = lambda some: float(some.mean())
) -> Interval:
    """A statistic of independent values [N, ...], resampled over the first axis (percentiles of 1,000 resamples)."""
    drawn = np.random.default_rng(seed)
    rows = len(values)
    found = [statistic(values[drawn.integers(rows, size=rows)]) for _ in range(_RESAMPLES)]
    return percentile_interval(statistic(values), found)


def percentile_interval(value: float, resampled: Sequence[float]) -> Interval:
    """A value between the percentiles of what resampled values gave."""
    low, high = np.percentile(resampled, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(value, float(low), float(high))


def auc(members: Values, others: Values) -> float:
    """Area under the ROC curve of scores [N] and [M]; higher scores mean member."""
    ranks = rankdata(np.concatenate([members, others]))[: len(members)].sum()
    return float((ranks - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def auc_interval(members: Values, others: Values, seed: int) -> Interval:
    """`auc` with a bootstrap over members and non-members, each resampled on its own."""
    drawn = np.random.default_rng(seed)
    found = [
        auc(drawn.choice(members, len(members)), drawn.choice(others, len(others))) for _ in range(_RESAMPLES // 5)
    ]
    return percentile_interval(auc(members, others), found)


def true_positive_rate(members: Values, others: Values, false_positive_rate: float) -> Interval:
    """Share of members above the threshold that lets at most that share of the non-members through, with Clopper-Pearson bounds."""
    allowed = int(false_positive_rate * len(others))
    threshold = np.sort(others)[::-1][allowed]
    return proportion(int((members > threshold).sum()), len(members))


def roc(members: Values, others: Values, points: int = 60) -> tuple[tuple[float, float], ...]:
    """The ROC curve as at most so many (false, true) positive rates."""
    is_member = np.repeat([1, 0], [len(members), len(others)])
    false_rate, true_rate, _ = roc_curve(is_member, np.concatenate([members, others]))
    chosen = np.unique(np.linspace(0, len(false_rate) - 1, points).astype(int))
    return tuple((float(false_rate[at]), float(true_rate[at])) for at in chosen)
