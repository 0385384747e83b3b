"""A lower bound on ε from one training run (Steinke, Nasr and Jagielski 2023), with canaries that the audit itself trains on.

The real update is not changed. The audit repeats the device's local round, with its mechanisms, on the client's images and
on randomly chosen canaries. An attacker then guesses from that run's update which canaries were chosen.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import bisect
from scipy.stats import binom

from audit.attacks.attack import Attack, Found, Progress, Trial
from audit.evidence import Case, Extractor, Knowledge, View, joined, networks
from audit.measures import CONFIDENCE, Chance, Control, Figure, Flags, Interval, Measure, Values
from audit.techniques.shadow_models import confidence, learnt_by_heart
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import Spent, after_round
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Callbacks, ClientState, Cohort, RoundContext, Weights
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

DELTA = 1e-5
_SHARES = (1.0, 0.5, 0.25, 0.1)  # shares of the canaries to guess, the surest first; the error is divided among them
_BLOCKS = 4  # blocks of random colours along each side of a canary
_CONTROL_ROWS, _CONTROL_EPOCHS, _CONTROL_BOUND = 64, 100, 0.5
_QUARTERS = {"classify": 0, "generate": 1}  # of the progress, by phase of a local round; the last is the control's
_TINY = 1e-9
Extractors = tuple[Weights, Weights]
_EPSILON = Measure("epsilon", "Lower bound on ε of one round (95 %)")


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least `right` correct guesses under (ε, δ)-DP training (main theorem for approximate DP).

    With q = e^ε / (e^ε + 1) and B ~ Binomial(guesses, q): Pr(B >= right) + 2 m δ · max over i of Pr(right - i <= B < right) / i.

    Args:
        canaries: m.
        guesses: r; the attacker abstains from the rest.
        right: v, the correct guesses.
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
    """Return the largest ε that these correct guesses rule out, with error probability `error`; 0 if they rule out none."""

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, right, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(bisect(excess, 0.0, high))


def best_bound(scores: Values, included: Flags, delta: float = DELTA) -> float:
    """Return the best bound over several numbers of guesses.

    The error is divided among them (Bonferroni), so the best one holds at 95 %.
    """
    error = (1 - CONFIDENCE) / len(_SHARES)
    return max(epsilon_bound(len(scores), *some, delta, error) for some in _guesses(scores, included))


def least_chance(scores: Values, included: Flags, epsilon: float, delta: float) -> float:
    """Return the probability of as many right guesses under (ε, δ)-DP training, at the best of several numbers of guesses."""
    found = min(p_value(len(scores), *some, epsilon, delta) for some in _guesses(scores, included))
    return min(1.0, len(_SHARES) * found)


def _guesses(scores: Values, included: Flags) -> Iterator[tuple[int, int]]:
    """Yield numbers of guesses and of right ones: half "trained on" from the top scores, half "not" from the bottom."""
    order = np.argsort(scores, kind="stable")
    for share in _SHARES:
        half = int(share * len(scores)) // 2
        yield 2 * half, int((~included[order[:half]]).sum() + included[order[len(order) - half :]].sum())


def make_canaries(spec: FederationSpec, count: int, streams: Streams) -> ImageSet:
    """Make images of random colour blocks with random labels: they share no pattern, so a label can only be memorised."""
    stream, image = streams.generator("canaries"), spec.image
    colours = torch.randint(0, 256, (count, image.channels, _BLOCKS, _BLOCKS), generator=stream).float()
    images = torch.nn.functional.interpolate(colours, (image.height, image.width)).byte()
    return ImageSet(images, torch.randint(spec.class_count, (count,), generator=stream), spec.classes)


def label_likelihoods(view: View, extractors: Extractors, canaries: ImageSet) -> tuple[Values, Values]:
    """Return the log posterior of each canary's label [N] before the round, and its increase in the round."""
    before, after = (
        np.log(confidence(networks.whole_model(view.spec, {**parts, Part.EXTRACTOR: extractor}), canaries) + _TINY)
        for extractor, parts in zip(extractors, (view.before.parts, view.update), strict=True)
    )
    return before, after - before


def _estimates(view: View, streams: Streams) -> Iterator[tuple[Extractor, Extractors]]:
    """Yield the extractors, before and after the round, that the attacker has or estimates."""
    for source in view.extractors(Extractor.START, Extractor.SURROGATE):
        before, after = (
            networks.estimated_extractor(replace(view, update=parts), source, parts[Part.CLASSIFIER], streams)
            for parts in (view.before.parts, view.update)
        )
        yield source, (before, after)


def _round_with(case: Case, canaries: ImageSet, streams: Streams, progress: Progress) -> tuple[View, Extractors]:
    """Run the device's local round from the real one's start, with its mechanisms and the canaries; return the view of its update and the true extractors."""
    view, before, privacy = case.view, case.model(), case.truth.privacy
    assert before is not None
    assert privacy is not None

    def report(phase: str, done: int, of: int) -> None:
        progress(_QUARTERS.get(phase, 2) * of + done, 4 * of)

    shown, cohort = Callbacks(report), Cohort(streams)
    ctx = RoundContext(view.spec, view.round, 1, streams.at("run"), callbacks=shown, cohort=cohort, privacy=privacy)
    data = joined(case.truth.train, canaries)
    result = protected_round(view.method, ClientState(before), data, view.before, ctx)
    extractors = before[Part.EXTRACTOR], result.private.parts[Part.EXTRACTOR]
    return replace(view, update=result.shared.parts), extractors


def accounted(case: Case, rows: int) -> tuple[float, float]:
    """Return the (ε, δ) that the accountant states for this round with this number of images; (infinite, `DELTA`) without DP-SGD."""
    view, settings = case.view, None if case.truth.privacy is None else case.truth.privacy.dp_sgd
    if settings is None:
        return math.inf, DELTA
    params = view.method.params_type.model_validate(view.spec.params)
    return after_round(Spent(), settings, view.method, params, rows).epsilon(settings.delta), settings.delta


def _figures(
    view: View, canaries: ImageSet, included: Flags, true: Extractors, stated: tuple[float, float], streams: Streams
) -> Iterator[Figure]:
    epsilon, delta = stated
    given = None if view.shares_extractor else label_likelihoods(view, true, canaries)[1]
    for source, extractors in _estimates(view, streams):
        blind, scores = label_likelihoods(view, extractors, canaries)
        bound, is_private = best_bound(scores, included, delta), math.isfinite(epsilon)
        floor = "the accountant's ε of this round: a bound above it is a defect", epsilon
        if not is_private:
            earlier = best_bound(blind, included, delta)
            floor = "the same number of guesses, from the aggregate before the round", earlier
        yield _EPSILON.figure(
            f"extractor: {source.value}",
            {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.CANDIDATES} | source.knowledge,
            Interval(bound, bound, bound),
            floor,
            len(included),
            ceiling=None if given is None else best_bound(given, included, delta),
            chance=Chance(least_chance(scores, included, *(stated if is_private else (0.0, 0.0)))),
        )


def _control(case: Case, canaries: ImageSet, included: Flags, streams: Streams) -> Control:
    """Train without defences until the canaries are memorised, and send the whole model."""
    some = case.truth.train.rows(range(min(_CONTROL_ROWS, len(case.truth.train))))
    data = joined(some, canaries.rows(np.flatnonzero(included).tolist()))
    whole = learnt_by_heart(case.view, data, _CONTROL_EPOCHS, streams.at("control"))
    (_, extractors), *_ = _estimates(whole, streams)
    bound = best_bound(label_likelihoods(whole, extractors, canaries)[1], included)
    title = f"{_CONTROL_EPOCHS} epochs on {len(some)} images and the canaries, whole model sent without defences"
    return Control(title, bound, f"a bound above {_CONTROL_BOUND}", bound > _CONTROL_BOUND)


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, streams, count = trial.case, trial.streams, trial.effort.of(0, 200, 1000)
    canaries = make_canaries(case.view.spec, count, streams)
    included = (torch.rand(count, generator=streams.generator("coin")) < 0.5).numpy()
    chosen = canaries.rows(np.flatnonzero(included).tolist())
    view, true = _round_with(case, chosen, streams, trial.progress)
    stated = accounted(case, len(case.truth.train) + len(chosen))
    yield from _figures(view, canaries, included, true, stated, streams)
    trial.progress(3, 4)
    yield _control(case, canaries, included, streams)
    trial.progress(4, 4)
    mechanisms = (case.truth.privacy.label if case.truth.privacy is not None else "") or "none"
    yield f"{count} canaries, {len(chosen)} of them used in an extra local round with {len(case.truth.train)} images of the client."
    yield f"It starts from the same weights as the real one, with the mechanisms: {mechanisms}. Its update is not encoded for the wire."
    yield f"At δ = {stated[1]:g}, training with a smaller ε would give this many correct guesses in less than 5 % of runs. A bound of 0 does not prove privacy."


def _lacks(case: Case) -> str | None:
    privacy = case.truth.privacy
    if privacy is None or (privacy.dp_sgd is None and case.view.report.epsilon is not None):
        return (
            "the device trains with DP-SGD, so a round without it says nothing: give its settings with --mechanism, e.g. "
            "--mechanism dp_sgd.noise_multiplier=1"
        )
    return None


ATTACK = Attack(
    name="epsilon",
    title="Lower bound on ε from one run",
    question="How strongly do the sent weights depend, at least, on a single training image?",
    source="Steinke, Nasr and Jagielski 2023: algorithm 1, main theorem for approximate DP, appendix D",
    carry_out=_carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    private=True,
    lacking=_lacks,
    not_quick="it needs a whole local round: run it with default or thorough effort",
    least_side=1,
)
