"""Membership: was this image in the client's training set? From the classifier alone; `generator_memory` asks the generator.

The attacker receives images without the flag, with equally many members and others of each class, so labels alone
reveal nothing. Scores become AUC, and true positive rates, which `image_generator` also uses.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from audit import measures
from audit.attacks.attack import Attack, Found, Tick, Trial, ceiling_control
from audit.evidence import Case, Extractor, Knowledge, Truth, View, joined
from audit.measures import Chance, Control, Figure, Flags, Interval, Measure, Pictures, Values
from audit.techniques import shadow_models
from audit.techniques.shadow_models import Score, Shadow, Target, ml_leaks, rmia
from fedcg.learning.image_set import ImageSet
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm
from fedcg.values import Value
from fedcg.wire.parts import Part

RATES = (0.05, 0.01, 0.001)
FEWEST_PASSED = 5  # non-members above a threshold: with fewer, its rate is not known
_AUC_OF_CHANCE = 0.5
_AUC = Measure("mia_auc", "Membership: area under the ROC curve")
_RATE = Measure("mia_tpr", "Membership: true positive rate at few false positives", "share")
_RESAMPLES = 200


class MemberScores(Value):
    """One attack in one setting: scores of the candidates with and without the update.

    Attributes:
        given: the scores with the device's own extractor or key, sent or given; None without it.
        floor_is: how scores without the update are computed.
    """

    setting: str
    knowledge: frozenset[Knowledge]
    score: Values
    blind: Values
    given: Values | None
    floor_is: str


def balanced_pairs(truth: Truth, most: int, stream: torch.Generator) -> tuple[ImageSet, Flags]:
    """Return candidates in random order, and which are members: per class equally many members and others, at most `most` of each in total."""
    inside, outside = truth.matched(stream)
    kept = torch.randperm(len(inside), generator=stream)[:most]
    order = torch.randperm(2 * len(kept), generator=stream)
    return joined(inside.rows(kept), outside.rows(kept)).rows(order), (order < len(kept)).numpy()


def membership_figures(scores: MemberScores, members: Flags, labels: torch.Tensor, seed: int) -> Iterator[Figure]:
    """Yield AUC, and the true positive rates for which there are enough images."""
    (inside, outside), blind = sides(scores.score, members), sides(scores.blind, members)
    given = None if scores.given is None else sides(scores.given, members)

    def likely(of: Callable[[Values, Flags], Values], least: float) -> Chance:
        return chance_of_gain(of, least, (scores.score, scores.blind), members, labels, seed)

    yield _AUC.figure(
        scores.setting,
        scores.knowledge,
        auc_gain(scores.score, np.zeros(len(members)), members, seed).over(-_AUC_OF_CHANCE),
        (scores.floor_is, max(_AUC_OF_CHANCE, auc(*blind))),
        len(members),
        gain=auc_gain(scores.score, scores.blind, members, seed),
        ceiling=None if given is None else auc(*given),
        chance=likely(aucs, _AUC_OF_CHANCE),
    )
    for rate in RATES:
        if rate * len(outside) >= FEWEST_PASSED:
            yield _RATE.figure(
                f"{scores.setting}, at {rate:.1%}",
                scores.knowledge,
                true_positive_rate(inside, outside, rate),
                (scores.floor_is, max(rate, true_positive_rate(*blind, rate).value)),
                len(members),
                ceiling=None if given is None else true_positive_rate(*given, rate).value,
                chance=likely(functools.partial(true_positive_rates, rate=rate), rate),
            )


def chance_of_gain(
    of: Callable[[Values, Flags], Values],
    least: float,
    scores: tuple[Values, Values],
    members: Flags,
    labels: torch.Tensor,
    seed: int,
) -> Chance:
    """Return the probability of at least this gain if "trained on" were random within each class.

    Args:
        of: scores [N], assignments of "member" [M, N] -> the figure, [M].
        least: the figure of chance.
        scores: with and without the update, [N] each; the gain is over the better of the latter and chance.
        members: [N].
        labels: [N]; as many members as others of each class.
        seed: for the assignments.
    """

    def gain(some: Flags) -> Values:
        return of(scores[0], some) - np.maximum(least, of(scores[1], some))

    return measures.chance(gain, labels.numpy(), members, seed)


def sides(scores: Values, members: Flags) -> tuple[Values, Values]:
    """Split scores into those of members and those of the others."""
    return scores[members], scores[~members]


def auc_gain(score: Values, blind: Values, members: Flags, seed: int) -> Interval:
    """Return AUC over the larger of 0.5 and the blind score's AUC, with a bootstrap that resamples images for both scores alike."""
    inside, outside = np.flatnonzero(members), np.flatnonzero(~members)
    drawn = np.random.default_rng(seed)

    def gain(some: NDArray[np.int64], more: NDArray[np.int64]) -> float:
        return auc(score[some], score[more]) - max(_AUC_OF_CHANCE, auc(blind[some], blind[more]))

    found = [gain(drawn.choice(inside, len(inside)), drawn.choice(outside, len(outside))) for _ in range(_RESAMPLES)]
    return measures.percentile_interval(gain(inside, outside), found)


def auc(members: Values, others: Values) -> float:
    """Return the area under the ROC curve of scores [N] and [M]; higher scores mean member."""
    scores = np.concatenate([members, others])
    return float(aucs(scores, np.arange(len(scores))[None] < len(members))[0])


def aucs(scores: Values, members: Flags) -> Values:
    """Return `auc` of scores [N] for each assignment of "member" [M, N], [M]."""
    inside = members.sum(1)
    ranks = members @ rankdata(scores)
    found: Values = (ranks - inside * (inside + 1) / 2) / (inside * (len(scores) - inside))
    return found


def true_positive_rate(members: Values, others: Values, false_positive_rate: float) -> Interval:
    """Return the share of members above the threshold that at most this share of the non-members passes, with Clopper-Pearson bounds."""
    allowed = int(false_positive_rate * len(others))
    threshold = np.sort(others)[::-1][allowed]
    return measures.proportion(int((members > threshold).sum()), len(members))


def true_positive_rates(scores: Values, members: Flags, rate: float) -> Values:
    """Return `true_positive_rate` of scores [N] for each assignment of "member" [M, N], [M]; ties count as above."""
    ranked = members[:, np.argsort(-scores, kind="stable")]
    passed = np.cumsum(~ranked, axis=1, dtype=np.int32)
    found: Values = (ranked & (passed <= int(rate * passed[0, -1]))).sum(1) / ranked.sum(1)
    return found


_FLOOR_IS = "the same without the update: a model of auxiliary images only; or chance"
_LIRA_MODELS = 8  # with fewer, a deviation per image is not a usable estimate
_FEWEST, _SHOWN = 14, 8  # 2^-14 is the smallest probability of 14 pairs
_CONTROL_ROWS, _CONTROL_EPOCHS, _CONTROL_AUC = 48, 200, 0.7
_USED = (Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.AUXILIARY, Knowledge.CANDIDATES)


def _attempts(target: Target) -> Iterator[tuple[str, Score, frozenset[Knowledge]]]:
    """Name, score, and additional knowledge."""
    yield "ML-Leaks", ml_leaks, frozenset()
    if target.others is not None:
        beside = frozenset({Knowledge.OTHERS})
        yield "PPIDSG's two shadow models", shadow_models.two_shadows, beside
        yield "RMIA by other clients", shadow_models.rmia_by_others, beside
    yield "RMIA", rmia, frozenset()
    if len(target.references) >= _LIRA_MODELS:
        yield "LiRA, offline", shadow_models.lira_offline, frozenset()


class _Prepared(Value):
    """The data shared by the attacks on one update; `blind` is the shadow model that replaces the update in the floor, `shadows` the others."""

    case: Case
    view: View
    shadows: tuple[Shadow, ...]
    blind: Shadow
    population: ImageSet
    candidates: ImageSet
    streams: Streams
    tick: Tick

    def target(self, view: View, source: Extractor, shadows: tuple[Shadow, ...] | None = None) -> Target:
        """Return the target for scores, for a view."""
        some = self.shadows if shadows is None else shadows
        return shadow_models.target_of(view, source, some, self.population, self.streams, self.tick)


def _epochs_of(view: View, rows: int, most: int) -> int:
    """Return the epochs of a shadow model: the round's, or those of all rounds if the extractor stays at the client; at most `most`."""
    params = view.method.params_type.model_validate(view.spec.params)
    of_round = math.ceil(params.steps * params.batch_size / rows) or params.epochs
    return min(of_round if view.shares_extractor else of_round * view.round, most)


def _scores(prepared: _Prepared, source: Extractor) -> Iterator[MemberScores]:
    """Yield every attack that is possible with extractors from this source."""
    view, images, streams = prepared.view, prepared.candidates, prepared.streams
    target, after = prepared.target(view, source), prepared.case.truth.after
    sent = {part: weights for part, weights in prepared.blind.parts.items() if part in view.update}
    blind = replace(target, victim=prepared.target(replace(view, update=sent, others={}), source, ()).victim)
    given = target if source.is_own else None
    if given is None and after is not None:
        given = prepared.target(view.with_private(after), Extractor.TRUE)
    for name, score, beside in _attempts(target):
        yield MemberScores(
            f"{name}, extractor: {source.value}",
            frozenset(_USED) | source.knowledge | beside,
            score(target, images, streams),
            score(blind, images, streams),
            None if given is None else score(given, images, streams),
            _FLOOR_IS,
        )


def _overfitted(truth: Truth, prepared: _Prepared) -> Iterator[Control]:
    """Test on whole models that memorised a few images with random labels: only membership explains a hit."""
    streams = prepared.streams.at("control")

    def relabelled(some: ImageSet, what: str, count: int = _CONTROL_ROWS) -> ImageSet:
        stream = streams.generator("labels", what)
        chosen = some.rows(torch.randperm(len(some), generator=stream)[:count])
        return replace(chosen, labels=torch.randint(len(some.classes), (len(chosen),), generator=stream))

    def learnt(some: ImageSet) -> View:
        return shadow_models.learnt_by_heart(prepared.view, some, _CONTROL_EPOCHS, streams)

    members, others = relabelled(truth.train, "members"), relabelled(truth.held_out, "others")
    count = _LIRA_MODELS if len(prepared.shadows) >= _LIRA_MODELS else 2
    known = relabelled(prepared.shadows[0].images, "known", (count + 2) * _CONTROL_ROWS)
    *seen, of_another, unseen = torch.arange(len(known)).tensor_split(count + 2)
    shadows = tuple(Shadow(learnt(known.rows(some)).update, known, some, unseen) for some in seen)
    whole = learnt(members)
    if prepared.view.others:
        whole = replace(whole, others={"another client": learnt(known.rows(of_another)).update})
    target = prepared.target(whole, Extractor.SENT, shadows)
    for name, score, _ in _attempts(target):
        value = auc(score(target, members, streams), score(target, others, streams))
        title = f"{name} on a whole model after {_CONTROL_EPOCHS} epochs on {len(members)} images with random labels"
        yield _control(title, value)


def _ceilings(
    case: Case, found: Sequence[MemberScores], members: Flags, labels: torch.Tensor, seed: int
) -> Iterator[Found]:
    pairs = [(one.given, one.blind) for one in found if one.given is not None]
    for name, of, least in (
        (_AUC.name, aucs, _AUC_OF_CHANCE),
        (_RATE.name, functools.partial(true_positive_rates, rate=RATES[0]), RATES[0]),
    ):
        chances = [chance_of_gain(of, least, pair, members, labels, seed).p for pair in pairs]
        values = [float(of(given, members[None])[0]) for given, _ in pairs]
        yield from ceiling_control(case, name, max(values, default=0.0), chances)


def _control(title: str, value: float) -> Control:
    return Control(title, value, f"AUC above {_CONTROL_AUC}", value > _CONTROL_AUC)


def most_exposed(found: Sequence[MemberScores], images: ImageSet, members: Flags) -> Pictures:
    """Return the members that the strongest attack recognises most surely, with the share of the others that score higher."""
    best = max(found, key=lambda one: auc(*sides(one.score, members)))
    inside = np.flatnonzero(members)
    rows = inside[np.argsort(-best.score[inside], kind="stable")[:_SHOWN]]
    passed = (best.score[~members][None] >= best.score[rows][:, None]).mean(1)
    shown = tuple(map(measures.png, measures.unit_pixels(images.images[rows])))
    title = f"the device's training images that are recognised most surely ({best.setting})"
    captions = tuple(f"{one:.1%}" for one in passed)
    return Pictures(title, (("share of other images that score as high", shown),), (captions,))


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, effort, streams, auxiliary = trial.case, trial.effort, trial.streams, trial.view.auxiliary
    assert auxiliary is not None
    sources = case.view.extractors(Extractor.START, Extractor.SURROGATE, Extractor.COLLUDER)
    count = effort.of(2, 4, 16)
    steps = count + 8 + len(sources) * (2 * count + 5)
    tick = trial.steps(steps)
    candidates, members = balanced_pairs(case.truth, effort.of(200, 1000, 10_000), streams.generator("candidates"))
    order = torch.randperm(len(auxiliary), generator=streams.generator("auxiliary"))
    order = order[: effort.of(400, 2000, 20_000)]
    population, fit = (auxiliary.rows(some) for some in order.tensor_split([len(order) // 4]))
    view = replace(case.view, auxiliary=fit)
    epochs = _epochs_of(view, len(fit) // 2, effort.of(10, 60, 200))
    *shadows, blind = shadow_models.train_shadows(view, fit, count + 1, epochs, streams, tick)
    prepared = _Prepared(case, view, tuple(shadows), blind, population, candidates, streams, tick)
    found = [one for source in sources for one in _scores(prepared, source)]
    yield from _overfitted(case.truth, prepared)
    trial.progress(steps, steps)
    for one in found:
        yield from membership_figures(one, members, candidates.labels, streams.seed("bootstrap"))
    yield from _ceilings(case, found, members, candidates.labels, streams.seed("bootstrap"))
    if isinstance(view.spec.input, ImageForm):
        yield most_exposed(found, candidates, members)
    yield f"Shadow and reference models: {count}, trained for {epochs} epochs on auxiliary images."
    count = int((~members).sum())
    for rate in RATES:
        if rate * count < FEWEST_PASSED:
            yield f"A true positive rate at {rate:.1%} false positives requires {math.ceil(FEWEST_PASSED / rate):,} images that were not trained on, and there are {count}."


def _lacks(case: Case) -> str | None:
    pairs = sum(map(min, zip(case.truth.train.label_counts(), case.truth.held_out.label_counts(), strict=True)))
    if pairs < _FEWEST:
        return f"only {pairs} pairs of training and held-out images share a class, {_FEWEST} are needed: give more images with --held-out"
    return None


ATTACK = Attack(
    name="membership",
    title="Membership of single images",
    question="Can an attacker who has an image find out whether the client trained on it?",
    source="Salem et al. 2019 (ML-Leaks); PPIDSG section 3; Zarifzadeh et al. 2024 (RMIA, offline); "
    "Carlini et al. 2022 (LiRA, offline)",
    carry_out=_carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    auxiliary=True,
    held_out=True,
    lacking=_lacks,
)
