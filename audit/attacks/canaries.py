"""A lower bound on ε from one training run (Steinke, Nasr and Jagielski 2023), by canaries that the audit itself trains on.

The real update is not touched: the audit runs the method's own local round once more, on the client's images and the canaries that a
coin chose, and an attacker guesses from what that run would send which ones they were.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from audit.attacks.attack import Attack, Found, Progress, Trial
from audit.evidence import Case, Extractor, Knowledge, View, joined, networks
from audit.measures import CONFIDENCE, Control, Figure, Interval, Measure, Values
from audit.techniques.shadow_models import confidence, learnt_by_heart
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Callbacks, ClientState, Cohort, RoundContext, Weights
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

DELTA = 1e-5
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of the canaries that are guessed, the surest first; the error is divided among them
_BLOCKS = 4  # a canary is so many blocks of random colours a side
_BISECTIONS = 40
_CONTROL_ROWS, _CONTROL_EPOCHS, _CONTROL_BOUND = 64, 100, 0.5
_QUARTERS = {"classify": 0, "generate": 1}  # of the progress, by phase of a local round; the last is the control's
_TINY = 1e-9
Flags = NDArray[np.bool_]
Extractors = tuple[Weights, Weights]
_EPSILON = Measure("epsilon", "Lower bound on ε of one round (95 %)")


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


def label_likelihoods(view: View, extractors: Extractors, canaries: ImageSet) -> tuple[Values, Values]:
    """Log posterior of each canary's label [N] before the round, and how much the round added to it."""
    before, after = (
        np.log(confidence(networks.whole_model(view.spec, extractor, parts[Part.CLASSIFIER]), canaries) + _TINY)
        for extractor, parts in zip(extractors, (view.before.parts, view.update), strict=True)
    )
    return before, after - before


def _estimates(view: View, streams: Streams) -> Iterator[tuple[Extractor, Extractors]]:
    """The extractors, before the round and after it, that the attacker has or makes."""
    for source in view.extractors(Extractor.START, Extractor.SURROGATE):
        if source is Extractor.SENT:
            yield source, (view.before.parts[Part.EXTRACTOR], view.update[Part.EXTRACTOR])
            continue
        before, after = (
            networks.estimated_extractor(view, source, parts[Part.CLASSIFIER], streams)
            for parts in (view.before.parts, view.update)
        )
        yield source, (before, after)


def _round_with(case: Case, canaries: ImageSet, streams: Streams, progress: Progress) -> tuple[View, Extractors]:
    """The method's own local round from where the real one started, on the canaries too: what is sent, and the true extractors."""
    view, before = case.view, case.model()
    assert before is not None

    def report(phase: str, done: int, of: int) -> None:
        progress(_QUARTERS.get(phase, 2) * of + done, 4 * of)

    ctx = RoundContext(view.spec, view.round, 1, streams.at("run"), callbacks=Callbacks(report), cohort=Cohort(streams))
    result = view.method.local_round(ClientState(before), joined(case.truth.train, canaries), view.before, ctx)
    extractors = before[Part.EXTRACTOR], result.private.parts[Part.EXTRACTOR]
    return replace(view, update=result.shared.parts), extractors


def _figures(view: View, canaries: ImageSet, included: Flags, true: Extractors, streams: Streams) -> Iterator[Figure]:
    ceiling = None
    if not view.shares_extractor:
        ceiling = best_bound(label_likelihoods(view, true, canaries)[1], included)
    for source, extractors in _estimates(view, streams):
        floor, bound = (best_bound(scores, included) for scores in label_likelihoods(view, extractors, canaries))
        yield _EPSILON.figure(
            f"extractor: {source.value}",
            {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.CANDIDATES} | source.knowledge,
            Interval(bound, bound, bound),
            ("the same number of guesses from the aggregate before the round", floor),
            len(included),
            ceiling=ceiling,
        )


def _control(case: Case, canaries: ImageSet, included: Flags, streams: Streams) -> Control:
    """Training without any defence that learns the canaries by heart, sent whole."""
    some = case.truth.train.rows(range(min(_CONTROL_ROWS, len(case.truth.train))))
    data = joined(some, canaries.rows(np.flatnonzero(included).tolist()))
    whole = learnt_by_heart(case.view, data, _CONTROL_EPOCHS, streams.at("control"))
    (_, extractors), *_ = _estimates(whole, streams)
    bound = best_bound(label_likelihoods(whole, extractors, canaries)[1], included)
    title = f"{_CONTROL_EPOCHS} epochs on {len(some)} images and the canaries, sent whole without a defence"
    return Control(title, bound, f"a bound above {_CONTROL_BOUND}", bound > _CONTROL_BOUND)


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, streams, count = trial.case, trial.streams, trial.effort.of(0, 200, 1000)
    canaries = make_canaries(case.view.spec, count, streams)
    included = (torch.rand(count, generator=streams.generator("coin")) < 0.5).numpy()
    chosen = canaries.rows(np.flatnonzero(included).tolist())
    view, true = _round_with(case, chosen, streams, trial.progress)
    yield from _figures(view, canaries, included, true, streams)
    trial.progress(3, 4)
    yield _control(case, canaries, included, streams)
    trial.progress(4, 4)
    yield (
        f"{count} canaries, {int(included.sum())} of them in one more local round beside {len(case.truth.train)} images of the client."
    )
    yield "The canaries' run starts where the real one did; its update is not coded for the wire."
    yield (
        f"At δ = {DELTA:g}, a training with a smaller ε gives so many right guesses in less than 5 % of runs. 0 is no proof of privacy."
    )


ATTACK = Attack(
    name="epsilon",
    title="Lower bound on ε from one run",
    question="How much do the sent weights depend, at least, on whether a single image was trained on?",
    source="Steinke, Nasr and Jagielski 2023: algorithm 1, main theorem for approximate DP, appendix D",
    carry_out=_carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    private=True,
    not_quick="it takes a whole local round: run it with default or thorough effort",
    least_side=1,
)
