"""A simulated federation with one hostile client: what it sends in the place of its update, and the coordinator's own defence on the server.

Uses torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch

from coordinator.config import RobustnessSettings
from coordinator.errors import ValidationError
from coordinator.updates import robustness
from experiments.simulation.simulation_record import deployed_of
from fedcg.learning.method import Aggregate, LabelCounts, Update, Weights
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, Updates, simulate
from fedcg.learning.simulation.tasks import Runner
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.payload import assert_finite
from fedcg.wire.parts import Part

Parts = Mapping[Part, Weights]
Attack = Callable[[Update, Parts, torch.Generator], Update]
"""(the honest update, the round's base, a stream) -> the update that is sent."""

MANY_EXAMPLES = 10**9
SEALED = frozenset({Part.EXTRACTOR, Part.STATISTICS})
"""What the attacks on sealed parts change: the coordinator never reads these."""


def noise(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """Gaussian numbers with mean and deviation of each honest tensor."""

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        spread = float(tensor.std()) if tensor.numel() > 1 else float(tensor.abs().max())
        return float(tensor.mean()) + spread * torch.randn(tensor.shape, generator=stream)

    return _each(honest, lambda part, name, tensor: drawn(tensor))


def moved(times: float) -> Attack:
    """`times` the honest step; below 0 the other way round."""

    def attack(honest: Update, base: Parts, stream: torch.Generator) -> Update:
        def step(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
            start = base[part][name] if part in base else torch.zeros_like(tensor)
            return start + times * (tensor - start)

        return _each(honest, step)

    return attack


def permuted(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The numbers of each honest tensor in another order."""

    def mixed(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=stream)].reshape(tensor.shape)

    return _each(honest, mixed)


def sealed(attack: Attack) -> Attack:
    """The attack on the parts that the coordinator can't read, beside the honest rest."""

    def attacked(honest: Update, base: Parts, stream: torch.Generator) -> Update:
        sent = attack(honest, base, stream).parts
        return replace(honest, parts={**honest.parts, **{part: sent[part] for part in sorted(SEALED & sent.keys())}})

    return attacked


def shuffled_labels(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights with the rows of the classifier's last layer moved on by one class."""

    def shuffled(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_last = part is Part.CLASSIFIER and name in list(honest.parts[part])[-2:]
        return tensor.roll(1, dims=0) if is_last else tensor

    return _each(honest, shuffled)


def constant_class(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights, with a last layer that names class 0 whatever it sees."""

    def named(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if part is not Part.CLASSIFIER or name not in list(honest.parts[part])[-2:]:
            return tensor
        flat = torch.zeros_like(tensor)
        return flat if tensor.ndim > 1 else flat.index_fill(0, torch.tensor([0]), 50.0)

    return _each(honest, named)


def many_examples(honest: Update, base: Parts, stream: torch.Generator) -> Update:
    """The honest weights, and the claim of 10^9 examples."""
    return replace(honest, examples=MANY_EXAMPLES)


ATTACKS: Mapping[str, Attack] = {
    "noise": noise,
    "sign-flipped": moved(-1.0),
    "sign-flipped-x10": moved(-10.0),
    "x100": moved(100.0),
    "label-shuffled": shuffled_labels,
    "constant-class": constant_class,
    "many-examples": many_examples,
    "sealed-noise": sealed(noise),
    "sealed-permuted": sealed(permuted),
    "sealed-sign-flipped": sealed(moved(-1.0)),
    "sealed-sign-flipped-x10": sealed(moved(-10.0)),
}


def _each(honest: Update, change: Callable[[Part, str, torch.Tensor], torch.Tensor]) -> Update:
    """The update with every floating-point tensor changed; variances stay above 0, so that its form is sound."""

    def changed(part: Part, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        value = change(part, name, tensor)
        return value.clamp(min=0.0) if name.rpartition(".")[2] == "running_var" else value

    parts = {
        part: {name: changed(part, name, tensor) for name, tensor in weights.items()}
        for part, weights in honest.parts.items()
    }
    return replace(honest, parts=parts)


_NO_ARTIFACT = "0" * 64


@dataclass(frozen=True)
class Screened:
    """What the defence made of one update in one round.

    Attributes:
        weight: examples that it counted for; 0 when it was not merged.
        reason: why it was rejected or is odd, or "".
    """

    round: int
    client: str
    weight: int
    reason: str


@dataclass(frozen=True)
class AttackedRun:
    """The end of a federation.

    Attributes:
        accuracy: of the honest clients' models with the last aggregate loaded, on the common test set; mean, in percent.
        deployed: likewise of the models that they put in use, by their own validation images.
        screened: one entry per update and round; empty without a defence.
    """

    accuracy: float
    deployed: float
    screened: tuple[Screened, ...]


class Defence:
    """The coordinator's checks of a round's updates; keeps the last round's typical distances."""

    def __init__(self, party: Party, settings: RobustnessSettings, quorum: int) -> None:
        self._party = party
        self._settings = settings
        self._quorum = quorum
        self._typical: robustness.Distances = {}
        self.screened: list[Screened] = []

    def passed(self, number: int, updates: Updates, aggregate: Aggregate) -> dict[str, Update]:
        """The updates that are merged, clipped and with the weights that they are given."""
        yardstick = robustness.Yardstick(Base(_NO_ARTIFACT, to_arrays(aggregate.parts)), self._typical)
        measured: dict[str, robustness.Movement] = {}
        reasons: dict[str, str] = {}
        method = get_method(self._party.spec.method)
        hidden = frozenset(self._party.spec.sealed)  # nobody can look into it
        for client, update in updates.items():
            seen = replace(update, parts={part: some for part, some in update.parts.items() if part not in hidden})
            arrays = to_arrays(seen.parts)
            try:
                assert_finite(arrays)
                yardstick.check(client, yardstick.distances(arrays))
            except ValidationError as error:
                reasons[client] = error.reason
                continue
            seed = self._party.server_context(number).streams.seed("sketch")
            measured[client] = robustness.movement_of(arrays, yardstick, method.payload.with_base, seed)
        figures = robustness.figures_of(measured)
        verdicts = robustness.verdicts_of(figures, self._settings, figures, self._quorum)
        reported = {client: updates[client].examples for client in measured}
        weights = robustness.merge_weights(reported, verdicts, self._settings)
        if len(weights) < self._quorum:  # the attempt fails
            weights = {}
        reasons |= {client: verdict.sentence for client, verdict in verdicts.items()}
        self.screened += [
            Screened(number, client, weights.get(client, 0), reasons[client]) for client in sorted(updates)
        ]
        medians = robustness.medians_of([measured[client].distances for client in weights])
        limits = robustness.limits_of(self._typical or medians, self._settings.clip_medians)
        self._typical = medians
        kept = {}
        for client, weight in weights.items():
            shares = robustness.over(measured[client].distances, limits)
            parts = robustness.clipped(to_arrays(updates[client].parts), yardstick.base.parts, shares)
            kept[client] = replace(updates[client], parts=to_weights(parts), examples=weight)
        return kept


def attacked_run(
    party: Party,
    runner: Runner,
    attack: Attack | None,
    settings: RobustnessSettings | None,
    *,
    quorum: int = 1,
    is_absent: bool = False,
) -> AttackedRun:
    """Run a federation in which the last client is hostile.

    Args:
        party: all clients.
        runner: trains them.
        attack: what the last client sends; None: its honest update.
        settings: of the defence; None: there is none.
        quorum: updates that a round with a defence needs.
        is_absent: the last client never delivers.
    """
    *honest, hostile = sorted(party.datasets)
    defence = None if settings is None else Defence(party, settings, quorum)
    has_counts = get_method(party.spec.method).needs.label_counts is LabelCounts.REQUIRED

    def screen(number: int, updates: Updates, aggregate: Aggregate) -> Updates:
        sent = {name: one if has_counts else replace(one, label_counts=None) for name, one in updates.items()}
        if is_absent:
            sent.pop(hostile, None)
        if attack is not None and hostile in sent:
            stream = torch.Generator().manual_seed(party.roots.devices[hostile][0] * 1000 + number)
            sent[hostile] = attack(sent[hostile], aggregate.parts, stream)
        return sent if defence is None else defence.passed(number, sent, aggregate)

    done = simulate(party, Schedule(shadow=False, screen=screen), runner=runner)
    used = [deployed_of(done, name).common for name in honest]
    return AttackedRun(
        100.0 * fmean(one for one in map(partial(_downloaded, done), honest) if one is not None),
        100.0 * fmean(one for one in used if one is not None),
        tuple(defence.screened) if defence else (),
    )


def _downloaded(done: Simulation, name: str) -> float | None:
    last = done.curves[name][-1]
    return last.common if last.common_after is None else last.common_after
