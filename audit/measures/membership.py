"""Membership: candidates half of which were trained on, and what scores of them come to (AUC, true positive rates, ROC curves)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.metrics import roc_curve

from audit.evidence import Knowledge, Truth, joined
from audit.measures.figures import Curve, Figure, Interval, Measure, Values, percentile_interval, proportion
from fedcg.learning.image_set import ImageSet

RATES = ((0.01, 100), (0.001, 10_000))  # false positive rates, and how many non-members a figure at each takes
_AUC_OF_CHANCE = 0.5
Flags = NDArray[np.bool_]
_AUC = Measure("mia_auc", "Membership: area under the ROC curve")
_RATE = Measure("mia_tpr", "Membership: share of members found at few false positives", "share")
_RESAMPLES = 200


@dataclass(frozen=True)
class MemberScores:
    """One attack in one situation: scores of the candidates by the update, and without it.

    Attributes:
        given: the scores with the device's own extractor or key, sent or given; None where there are none.
        floor_is: what scores without the update are made of.
    """

    setting: str
    knowledge: frozenset[Knowledge]
    score: Values
    blind: Values
    given: Values | None
    floor_is: str


def balanced_pairs(truth: Truth, most: int, stream: torch.Generator) -> tuple[ImageSet, Flags]:
    """Candidates in random order, and which are members: of every class as many members as others, at most `most` of each in all."""
    inside, outside = truth.matched(stream)
    kept = torch.randperm(len(inside), generator=stream)[:most]
    order = torch.randperm(2 * len(kept), generator=stream)
    return joined(inside.rows(kept), outside.rows(kept)).rows(order), (order < len(kept)).numpy()


def membership_figures(scores: MemberScores, members: Flags, seed: int) -> Iterator[Figure]:
    """AUC, and the true positive rates that there are images enough for."""
    (inside, outside), blind = sides(scores.score, members), sides(scores.blind, members)
    given = None if scores.given is None else sides(scores.given, members)
    yield _AUC.figure(
        scores.setting,
        scores.knowledge,
        auc_interval(inside, outside, seed),
        (scores.floor_is, max(_AUC_OF_CHANCE, auc(*blind))),
        len(members),
        gain=auc_gain(scores.score, scores.blind, members, seed),
        ceiling=None if given is None else auc(*given),
    )
    for rate, fewest in RATES:
        if len(outside) >= fewest:
            yield _RATE.figure(
                f"{scores.setting}, at {rate:.1%}",
                scores.knowledge,
                true_positive_rate(inside, outside, rate),
                (scores.floor_is, max(rate, true_positive_rate(*blind, rate).value)),
                len(members),
                ceiling=None if given is None else true_positive_rate(*given, rate).value,
            )


def sides(scores: Values, members: Flags) -> tuple[Values, Values]:
    """Those of members and those of the others."""
    return scores[members], scores[~members]


def auc_gain(score: Values, blind: Values, members: Flags, seed: int) -> Interval:
    """AUC over the larger of 0.5 and the blind score's, with a bootstrap that resamples images for both scores alike."""
    inside, outside = np.flatnonzero(members), np.flatnonzero(~members)
    drawn = np.random.default_rng(seed)

    def gain(some: NDArray[np.int64], more: NDArray[np.int64]) -> float:
        return auc(score[some], score[more]) - max(_AUC_OF_CHANCE, auc(blind[some], blind[more]))

    found = [gain(drawn.choice(inside, len(inside)), drawn.choice(outside, len(outside))) for _ in range(_RESAMPLES)]
    return percentile_interval(gain(inside, outside), found)


def roc_curves(found: Sequence[MemberScores], members: Flags) -> Curve:
    """A line for each attack, without the point at 0."""
    lines = {one.setting: tuple(point for point in roc(*sides(one.score, members)) if point[0] > 0) for one in found}
    return Curve("Membership: ROC curves", "false positive rate", "true positive rate", lines, log_x=True)


def auc(members: Values, others: Values) -> float:
    """Area under the ROC curve of scores [N] and [M]; higher scores mean member."""
    ranks = rankdata(np.concatenate([members, others]))[: len(members)].sum()
    return float((ranks - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def auc_interval(members: Values, others: Values, seed: int) -> Interval:
    """`auc` with a bootstrap over members and non-members, each resampled on its own."""
    drawn = np.random.default_rng(seed)
    found = [auc(drawn.choice(members, len(members)), drawn.choice(others, len(others))) for _ in range(_RESAMPLES)]
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
