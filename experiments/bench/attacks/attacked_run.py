"""One federation with one hostile client, in one process: the method's own halves and the coordinator's own defence. Uses torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from statistics import fmean
from typing import Any, TypeVar

import torch

from coordinator.aggregation.behaviour import behaviour_of
from coordinator.config import RobustnessSettings
from coordinator.errors import ValidationError
from coordinator.updates.figures import Behaviour, figures_of, merge_weights, verdicts_of
from coordinator.updates.robustness import (
    Distances,
    Yardstick,
    clipped,
    limits_of,
    medians_of,
    over,
)
from experiments.bench.attacks.attackers import Attack
from fedcg.learning.mechanisms.protected_round import downloaded_parts
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    DivergedError,
    LabelCounts,
    LocalResult,
    ServerState,
    Update,
    Weights,
)
from fedcg.learning.networks.initial_weights import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import update_of
from fedcg.learning.simulation.tasks import LocalTask, MemorySpill, local_task
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.tensors import assert_finite
from fedcg.wire.parts import Part

ResultT = TypeVar("ResultT")
_NO_ARTIFACT = "0" * 64


@dataclass(frozen=True)
class Screened:
    """What the defence made of one update in one round.

    Attributes:
        figures: as the API shows them.
        weight: examples that it counted for; 0 when it was not merged.
        reason: why it was rejected or is odd, or "".
    """

    round: int
    client: str
    figures: Mapping[str, float]
    weight: int
    reason: str


@dataclass(frozen=True)
class AttackedRun:
    """The end of a federation.

    Attributes:
        accuracy: of the honest clients' models with the last aggregate loaded, on the common test set; mean, in percent.
        screened: one entry per update and round; empty without a defence.
    """

    accuracy: float
    screened: tuple[Screened, ...]


class Trainer:
    """A federation's clients and server; what runs have in common (the first round of all of them, say) is computed once."""

    def __init__(self, party: Party) -> None:
        self.party = party
        self._known: dict[str, Any] = {}

    def local(self, client: str, number: int, state: ClientState, aggregate: Aggregate) -> LocalResult | None:
        """A client's local round; None where it diverged."""
        task = LocalTask(client, number, state, None)
        what = f"local {client} {number}"
        return self._once(what, [state.parts, aggregate.parts], lambda: local_task(self.party, task, aggregate).result)

    def behaviour(self, number: int, update: Update, yardstick: Yardstick) -> Behaviour:
        """What the coordinator measures of an update."""
        spec, streams = self.party.spec, self.party.server_context(number).streams
        parts = to_arrays(update.parts)
        base = to_weights(yardstick.base.parts)
        return self._once(
            f"behaviour {number}", [update.parts, base], lambda: behaviour_of(parts, yardstick, spec, streams)
        )

    def merged(self, number: int, server: ServerState, updates: Mapping[str, Update]) -> ServerState:
        """The server's state after a round; the one before it where there is nothing to merge, or the merge diverges."""

        def merge() -> ServerState:
            aggregator = get_method(self.party.spec.method).aggregator(
                server, self.party.server_context(number), MemorySpill()
            )
            try:
                return aggregator.finish({name: partial(updates.__getitem__, name) for name in updates})[1]
            except DivergedError:
                return server

        weights = " ".join(f"{name} {update.examples}" for name, update in sorted(updates.items()))
        inputs = [server.aggregate.parts, *(updates[name].parts for name in sorted(updates))]
        return self._once(f"merge {number} {weights}", inputs, merge) if updates else server

    def _once(self, what: str, inputs: Sequence[Mapping[Part, Weights]], work: Callable[[], ResultT]) -> ResultT:
        digest = sha256(what.encode())
        for parts in inputs:
            for part, arrays in sorted(to_arrays(parts).items()):
                for name, array in sorted(arrays.items()):
                    digest.update(f"{part} {name}".encode() + array.tobytes())
        key = digest.hexdigest()
        if key not in self._known:
            self._known[key] = work()
        found: ResultT = self._known[key]
        return found


class Defence:
    """The coordinator's checks of a round's updates; keeps the last round's typical distances."""

    def __init__(self, trainer: Trainer, settings: RobustnessSettings, quorum: int) -> None:
        self._trainer = trainer
        self._settings = settings
        self._quorum = quorum
        self._typical: Distances = {}
        self.screened: list[Screened] = []

    def passed(self, number: int, updates: Mapping[str, Update], aggregate: Aggregate) -> dict[str, Update]:
        """The updates that are merged, clipped and with the weights that they are given."""
        yardstick = Yardstick(Base(_NO_ARTIFACT, to_arrays(aggregate.parts)), self._typical)
        measured: dict[str, Behaviour] = {}
        reasons: dict[str, str] = {}
        hidden = get_method(self._trainer.party.spec.method).summed  # behind masks: nobody can look into it
        for client, update in updates.items():
            seen = replace(update, parts={part: some for part, some in update.parts.items() if part not in hidden})
            arrays = to_arrays(seen.parts)
            try:
                assert_finite(arrays)
                yardstick.check(client, yardstick.distances(arrays))
            except ValidationError as error:
                reasons[client] = error.reason
                continue
            measured[client] = self._trainer.behaviour(number, seen, yardstick)
        figures = figures_of(measured, has_trained_base=number > 1)
        verdicts = verdicts_of(figures, self._settings, figures, self._quorum)
        reported = {client: updates[client].examples for client in measured}
        weights = merge_weights(reported, verdicts, self._settings)
        if len(weights) < self._quorum:  # the attempt fails
            weights = {}
        reasons |= {client: verdict.sentence for client, verdict in verdicts.items()}
        self.screened += [
            Screened(
                number,
                client,
                figures[client].as_json() if client in figures else {},
                weights.get(client, 0),
                reasons[client],
            )
            for client in sorted(updates)
        ]
        medians = medians_of([measured[client].distances for client in weights])
        limits = limits_of(self._typical or medians, self._settings.clip_medians)
        self._typical = medians
        kept = {}
        for client, weight in weights.items():
            shares = over(measured[client].distances, limits)
            parts = clipped(to_arrays(updates[client].parts), yardstick.base.parts, shares)
            kept[client] = replace(updates[client], parts=to_weights(parts), examples=weight)
        return kept


def attacked_run(
    trainer: Trainer,
    attack: Attack | None,
    settings: RobustnessSettings | None,
    *,
    quorum: int = 1,
    is_absent: bool = False,
) -> AttackedRun:
    """Run a federation in which the last client is hostile.

    Args:
        trainer: with all clients.
        attack: what the last client sends; None: its honest update.
        settings: of the defence; None: there is none.
        quorum: updates that a round with a defence needs.
        is_absent: the last client never delivers.
    """
    party, spec, method = trainer.party, trainer.party.spec, get_method(trainer.party.spec.method)
    initial = initial_parts(spec, party.roots.cohort)
    server: ServerState = method.init_server(spec, initial)
    names = sorted(party.datasets)
    states = {name: method.init_client(spec, initial) for name in names}
    defence = None if settings is None else Defence(trainer, settings, quorum)
    for number in range(1, spec.rounds + 1):
        updates: dict[str, Update] = {}
        for name in names[:-1] if is_absent else names:
            result = trainer.local(name, number, states[name], server.aggregate)
            if result is not None:
                states[name] = result.private
                counts = result.report.label_counts if method.label_counts is LabelCounts.REQUIRED else None
                updates[name] = replace(update_of(name, result), label_counts=counts)
        if attack is not None and names[-1] in updates:
            stream = torch.Generator().manual_seed(party.roots.devices[names[-1]][0] * 1000 + number)
            updates[names[-1]] = attack(updates[names[-1]], server.aggregate.parts, stream)
        if defence is not None:
            updates = defence.passed(number, updates, server.aggregate)
        server = trainer.merged(number, server, updates)
    return AttackedRun(_accuracy(party, states, server, names[:-1]), tuple(defence.screened) if defence else ())


def _accuracy(party: Party, states: Mapping[str, ClientState], server: ServerState, honest: list[str]) -> float:
    common = party.common
    assert common is not None

    def accuracy(name: str) -> float:
        own, context = states[name].parts, party.client_context(name, party.spec.rounds)
        parts = {**own, **downloaded_parts(own, server.aggregate, party.datasets[name].train, context)}
        return evaluate(party.spec, parts, common).accuracy

    return 100.0 * fmean(map(accuracy, honest))
