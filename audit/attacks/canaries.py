"""A lower bound on ε from one training run (Steinke, Nasr and Jagielski 2023), by canaries that the audit itself trains on.

The real update is not touched: the audit runs the method's own local round once more, on the client's images and the canaries that a
coin chose, and an attacker guesses from what that run would send which ones they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from audit.attacks.attack import Attack, Effort, Progress
from audit.attacks.shadow_models import confidence
from audit.evidence.case import Case, Knowledge, View
from audit.evidence.device_data import joined
from audit.evidence.networks import Extractor, estimated_extractor, trained_alone, whole_model
from audit.measures.figures import CONFIDENCE, Control, Figure, Interval, Outcome
from audit.measures.statistics import Values
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ClientState, RoundContext, Weights
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

DELTA = 1e-5
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of the canaries that are guessed, the surest first; the error is divided among them
_BLOCKS = 4  # a canary is so many blocks of random colours a side
_BISECTIONS = 40
_CONTROL_ROWS, _CONTROL_EPOCHS, _CONTROL_BOUND = 64, 100, 0.5
_CONTROL_PARAMS = {"optimiser": "adam", "lr": 3e-3, "weight_decay": 0.0, "batch_size": 16}
_TINY = 1e-9
Flags = NDArray[np.bool_]


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The most likely at least so many right guesses are where training is (ε, δ)-DP (the main theorem for approximate DP).

    With q = e^ε / (e^ε + 1) and B ~ Binomial(guesses, q): Pr(B >= right) + 2 m δ · max over i of Pr(right - i <= B < right) / i.

    Args:
        canaries: m.
        guesses: r, the others were abstained from.
        right: v.
        epsilon: at least 0.
        delta: in [0, 1].
    """
    share = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, share))
    slack = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, share)) + 2 * canaries * delta * slack)


def epsilon_bound(
    canaries: int, guesses: int, right: int, delta: float = DELTA, error: float = 1 - CONFIDENCE
) -> float:
    """The largest ε that so many right guesses rule out, at a probability `error` of being wrong; 0 where they rule out none."""
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, right, low, delta) >= error:
        return 0.0
    while p_value(canaries, guesses, right, high, delta) < error:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < error:
            low = middle
        else:
            high = middle
    return low


def best_bound(scores: Values, included: Flags) -> float:
    """The best bound over several numbers of guesses: half "trained on" from the top of the scores, half "not" from the bottom.

    The error is shared out among them (Bonferroni), so that the best of them holds at 95 %.
    """
    order, error, found = np.argsort(scores, kind="stable"), (1 - CONFIDENCE) / len(_SHARES), 0.0
    for share in _SHARES:
        half = int(share * len(scores)) // 2
        right = int((~included[order[:half]]).sum() + included[order[len(order) - half :]].sum())
        found = max(found, epsilon_bound(len(scores), 2 * half, right, error=error))
    return found


def make_canaries(spec: FederationSpec, count: int, streams: Streams) -> ImageSet:
    """Images of blocks in random colours with random labels: nobody's, alike in nothing, so that a label has to be learnt by heart."""
    stream, image = streams.generator("canaries"), spec.image
    colours = torch.randint(0, 256, (count, image.channels, _BLOCKS, _BLOCKS), generator=stream).float()
    images = torch.nn.functional.interpolate(colours, (image.height, image.width)).byte()
    return ImageSet(images, torch.randint(spec.class_count, (count,), generator=stream), spec.classes)


@dataclass(frozen=True)
class CanaryRun:
    """One run with canaries.

    Attributes:
        view: what the attacker has of it.
        private: parts that it did not send; before and after.
        included: which canaries were trained on; the attacker has not got it.
    """

    view: View
    private: tuple[Mapping[Part, Weights], Mapping[Part, Weights]]
    canaries: ImageSet
    included: Flags


def _run_with_canaries(
    case: Case, canaries: ImageSet, included: Flags, streams: Streams, progress: Progress
) -> CanaryRun:
    """The method's own local round, from where the real one started."""
    view, before = case.view, case.truth.before
    assert before is not None
    data = joined(case.truth.train, canaries.rows(np.flatnonzero(included)))
    phases: list[str] = []  # at most three; the fourth quarter is the control's

    def report(phase: str, done: int, of: int) -> None:
        if phase not in phases:
            phases.append(phase)
        progress((len(phases) - 1) * of + done, 4 * of)

    ctx = RoundContext(view.spec, view.round, 1, view.spec.rounds, streams.at("run"), progress=report)
    state = ClientState({**before, **view.before.parts})
    result = view.method.local_round(state, data, view.before, ctx)
    after = {part: result.private.parts[part] for part in before}
    return CanaryRun(replace(view, update=result.shared.parts), (before, after), canaries, included)


def label_likelihoods(view: View, extractors: tuple[Weights, Weights], canaries: ImageSet) -> tuple[Values, Values]:
    """Log posterior of each canary's label [N] before the round and after it, by the extractors of then."""
    before, after = (
        np.log(confidence(whole_model(view.spec, extractor, parts[Part.CLASSIFIER]), canaries) + _TINY)
        for extractor, parts in zip(extractors, (view.before.parts, view.update), strict=True)
    )
    return before, after


def _guesses(run: CanaryRun, source: Extractor, streams: Streams) -> tuple[Values, Values]:
    """Scores of the canaries: how much likelier the round made the label, and, without the update, how likely it was before."""
    view = run.view
    if source is Extractor.SENT:
        extractors = view.before.parts[Part.EXTRACTOR], view.update[Part.EXTRACTOR]
    elif source is Extractor.TRUE:
        extractors = run.private[0][Part.EXTRACTOR], run.private[1][Part.EXTRACTOR]
    else:
        estimate = estimated_extractor(view, source, view.update[Part.CLASSIFIER], streams)
        extractors = estimate, estimate
    before, after = label_likelihoods(view, extractors, run.canaries)
    return after - before, before


def _lacks(case: Case) -> str | None:
    return case.lacks(private=True, parts=frozenset({Part.CLASSIFIER}))


def _run(case: Case, effort: Effort, progress: Progress) -> Outcome:
    count, streams = effort.of(0, 200, 1000), case.streams.at(ATTACK.name)
    if not count:
        return Outcome(ATTACK.name, skipped="it takes a whole local round: run it with default or thorough effort")
    canaries = make_canaries(case.view.spec, count, streams)
    included = (torch.rand(count, generator=streams.generator("coin")) < 0.5).numpy()
    run = _run_with_canaries(case, canaries, included, streams, progress)
    progress(3, 4)
    control = _control(case, canaries, included, streams)
    progress(4, 4)
    return Outcome(
        ATTACK.name,
        tuple(_figures(run, streams)),
        (control,),
        notes=(
            f"{count} canaries, {int(included.sum())} of them in one more local round beside {len(case.truth.train)} images of the client.",
            "The canaries' run starts where the real one did; its update is not coded for the wire.",
            f"At δ = {DELTA:g}, a training with a smaller ε gives so many right guesses in less than 5 % of runs. 0 is no proof of privacy.",
        ),
    )


def _figures(run: CanaryRun, streams: Streams) -> Iterator[Figure]:
    view, sources, ceiling = run.view, [Extractor.SENT], None
    if not view.shares_extractor:
        sources = [Extractor.START, *([] if view.auxiliary is None else [Extractor.SURROGATE])]
        ceiling = best_bound(_guesses(run, Extractor.TRUE, streams)[0], run.included)
    for source in sources:
        bound, floor = (best_bound(scores, run.included) for scores in _guesses(run, source, streams))
        knowledge = {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.CANDIDATES} | source.knowledge
        yield Figure(
            "epsilon",
            "Lower bound on ε of one round (95 %)",
            f"extractor: {source.value}",
            tuple(sorted(knowledge, key=lambda one: one.name)),
            Interval(bound, bound, bound),
            floor,
            "the same number of guesses from the aggregate before the round",
            Interval(bound - floor, bound - floor, bound - floor),
            len(run.included),
            ceiling,
        )


def _control(case: Case, canaries: ImageSet, included: Flags, streams: Streams) -> Control:
    """Training without any defence that learns the canaries by heart, sent whole."""
    view = case.view
    spec = view.spec.model_copy(update={"params": {**view.spec.params, **_CONTROL_PARAMS}})
    start = {**view.start(), **view.before.parts}
    some = case.truth.train.rows(range(min(_CONTROL_ROWS, len(case.truth.train))))
    data = joined(some, canaries.rows(np.flatnonzero(included)))
    parts = trained_alone(replace(view, spec=spec), start, data, streams.at("control"), _CONTROL_EPOCHS)
    whole = replace(view, spec=spec, update=parts, before=replace(view.before, parts=start))
    scores, _ = _guesses(CanaryRun(whole, ({}, {}), canaries, included), Extractor.SENT, streams)
    bound = best_bound(scores, included)
    title = f"{_CONTROL_EPOCHS} epochs on {len(some)} images and the canaries, sent whole without a defence"
    return Control(title, bound, f"a bound above {_CONTROL_BOUND}", bound > _CONTROL_BOUND)


ATTACK = Attack(
    name="epsilon",
    title="Lower bound on ε from one run",
    question="How much do the sent weights depend, at least, on whether a single image was trained on?",
    source="Steinke, Nasr and Jagielski 2023: algorithm 1, main theorem for approximate DP, appendix D",
    lacks=_lacks,
    run=_run,
)
