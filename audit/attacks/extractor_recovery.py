"""Extractor recovery: what the mean of all boxes' outputs on the cohort's probes tells of one box's private extractor.

The attacker is the coordinator, which sees the sum, with one box's help, which knows the probes: it fits an extractor to the mean, and to
the difference of two rounds' sums. What counts is how much more of this device's features it then explains than by the others' mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from audit.attacks.attack import Attack, Found, Trial
from audit.evidence import Case, Colluder, Knowledge
from audit.measures import Control, Measure, Values, bootstrap
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.wire.parts import Part

_CONTROL_SHARE = 0.5
_SUM = (Knowledge.AFTER, Knowledge.COLLUDER)
_EXTRACTOR = Measure(
    "extractor",
    "Extractor: share of the variance of the device's features that an attacker's own extractor explains",
    "share",
)


@dataclass(frozen=True)
class _Guess:
    """Outputs on the probes, [M, D], that an attacker takes for the device's."""

    setting: str
    knowledge: tuple[Knowledge, ...]
    outputs: torch.Tensor


def _guesses(case: Case, colluder: Colluder) -> Iterator[_Guess]:
    view, truth = case.view, case.truth
    assert truth.after is not None
    own = colluder.outputs(truth.after[Part.EXTRACTOR])
    mean = colluder.mean(view.after)
    assert mean is not None
    yield _Guess("mean outputs of the round", _SUM, mean)
    earlier = colluder.mean(view.before)
    if earlier is not None and truth.before is not None:
        knowledge = (Knowledge.BEFORE, *_SUM)
        rest = colluder.mean_without(view.before, truth.before[Part.EXTRACTOR], len(truth.train))
        if rest is not None:
            found = _difference(case, colluder, mean, rest)
            yield _Guess("difference to the round before, in which the device was left out", knowledge, found)
    yield _Guess("its own outputs, without masks", (Knowledge.PRIVATE, Knowledge.COLLUDER), own)


def _difference(case: Case, colluder: Colluder, mean: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """One device's outputs, were the others' the same in both rounds: the sum of all less the sum of the others."""
    assert case.view.after is not None
    total, own = colluder.weight(case.view.after), colluder.weight_of(len(case.truth.train))
    return ((total * mean - (total - own) * rest) / own).clamp(min=0.0)


@torch.no_grad()
def _features(case: Case, extractor: Weights, images: ImageSet) -> torch.Tensor:
    net = load_part(case.view.spec, Part.EXTRACTOR, extractor).eval()
    blocks = (net(normalise(some, case.view.spec.image)).flatten(1) for some in images.images.split(512))
    return torch.cat(list(blocks)).double()


def _errors(case: Case, extractor: Weights, true: torch.Tensor, images: ImageSet) -> Values:
    """Squared error of an extractor's features, [N]."""
    found: Values = (_features(case, extractor, images) - true).square().sum(1).numpy()
    return found


def _explained(rows: Values) -> float:
    """The share of the variance that is explained: of columns error and variance of each image."""
    return float(1.0 - rows[:, 0].sum() / rows[:, -1].sum())


def _gain(rows: Values) -> float:
    """Over the second column's error, or over knowing nothing but the mean."""
    return _explained(rows) - max(0.0, _explained(rows[:, 1:]))


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, view, truth, streams, effort = trial.case, trial.view, trial.truth, trial.streams, trial.effort
    assert view.colluder is not None and truth.after is not None and view.after is not None  # noqa: PT018 - `_lacks`
    colluder = replace(view.colluder, steps=effort.of(200, 2000, 10_000))
    order = torch.randperm(len(truth.held_out), generator=streams.generator("images"))
    images = truth.held_out.rows(order[: effort.of(500, 2000, 10_000)])
    true = _features(case, truth.after[Part.EXTRACTOR], images)
    spread: Values = (true - true.mean(0)).square().sum(1).numpy()
    guesses = list(_guesses(case, colluder))
    tick = trial.steps(len(guesses) + 1)
    others = colluder.mean_without(view.after, truth.after[Part.EXTRACTOR], len(truth.train))
    blind = _errors(case, colluder.start() if others is None else colluder.fitted(others), true, images)
    tick()
    rows = []
    for guess in guesses:
        rows.append(np.stack([_errors(case, colluder.fitted(guess.outputs), true, images), blind, spread], axis=1))
        tick()
    seed = streams.seed("bootstrap")
    values = [bootstrap(some, seed, _explained) for some in rows]
    own = values[-1].value  # of its own outputs
    for guess, some, value in zip(guesses, rows, values, strict=True):
        yield _EXTRACTOR.figure(
            guess.setting,
            guess.knowledge,
            value,
            ("an extractor fitted to the mean outputs of the other boxes", max(0.0, _explained(some[:, 1:]))),
            len(images),
            gain=bootstrap(some, seed, _gain),
            ceiling=None if guess is guesses[-1] else own,
        )
    title = "share that is explained by a box's own outputs, were they sent without masks"
    yield Control(title, own, f"at least {_CONTROL_SHARE:.0%}", own >= _CONTROL_SHARE)
    share = colluder.weight_of(len(truth.train)) / colluder.weight(view.after)
    yield f"This device has {share:.0%} of the sum's weight. The method has every box fit its extractor to the mean."


def _lacks(case: Case) -> str | None:
    colluder = case.view.colluder
    if Part.STATISTICS not in case.view.method.payload.summed:
        return f"{case.view.spec.method} adds up no outputs on probe images"
    if colluder is None:
        return "without the cohort's secret, which makes the probes, the mean outputs say nothing: give --cohort"
    if case.truth.after is None:
        return "what is recovered is compared with the device's extractor: give --private"
    if colluder.mean(case.view.after) is None:
        return "no sum was opened in this round"
    return case.lacks(held_out=True)


ATTACK = Attack(
    "extractor",
    "Extractor recovery",
    "Can the coordinator, helped by one other box, rebuild this device's private extractor from the sums of all devices' outputs?",
    "model extraction by fitting outputs (Tramèr et al. 2016), on sums (Bonawitz et al. 2017) of one round and of two",
    _carry_out,
    lacking=_lacks,
)
