"""Many clients and the server in one process, calling exactly the functions that agents and coordinator call.

Order of execution never changes results: every client's streams are its own, and aggregation runs in client-id order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fedcg.learning.data import ImageSet
from fedcg.learning.evaluation import consistency, evaluate, generator_spread
from fedcg.learning.initial import initial_parts, shadow_spec
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    LocalResult,
    Progress,
    RoundContext,
    ServerState,
    Update,
    Weights,
    silent,
)
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

ATTEMPT = 1


@dataclass(frozen=True)
class ClientData:
    """One client's images: what it trains on, chooses its best round by, and is measured on."""

    train: ImageSet
    val: ImageSet
    test: ImageSet


@dataclass(frozen=True)
class Roots:
    """The roots of randomness (design §5): one secret per device, the cohort's, the coordinator's."""

    cohort: bytes
    coordinator: bytes
    devices: Mapping[str, bytes]

    @staticmethod
    def from_seed(seed: int, clients: tuple[str, ...]) -> Roots:
        """All roots from one public seed: for simulations and demos, not for a deployment."""
        streams = Streams(f"fedcg simulation {seed}".encode())

        def secret(*purpose: object) -> bytes:
            return b"".join(streams.seed(*purpose, part).to_bytes(8, "big") for part in range(4))

        return Roots(secret("cohort"), secret("coordinator"), {name: secret("device", name) for name in clients})


@dataclass(frozen=True)
class RoundRecord:
    """One client after one round.

    Attributes:
        round: counted from 1.
        accuracy: on its own test images, before the download. `validation`, `common` likewise on other images.
        accuracy_after: on its own test images, with this round's aggregate loaded; None without shared parts.
        local_accuracy: the shadow's on its own test images (None without a shadow); `local_validation`, `local_common` likewise.
        consistency: share of own generated features that its classifier recognises; None without a generator.
        spread: mean std(G) / std(F) of its own generator.
        loss: mean training cross-entropy.
        seconds: of the local round, without shadow and evaluation.
    """

    round: int
    accuracy: float
    validation: float
    common: float | None
    accuracy_after: float | None
    local_accuracy: float | None
    local_validation: float | None
    local_common: float | None
    consistency: float | None
    spread: float | None
    loss: float
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """The outcome: one curve per client, seconds of each aggregation, everybody's last state and the last aggregate."""

    curves: Mapping[str, tuple[RoundRecord, ...]]
    aggregate_seconds: tuple[float, ...]
    states: Mapping[str, ClientState]
    aggregate: Aggregate

    def best(self, client: str) -> RoundRecord:
        """A client's record at its best validation round (the first of equals)."""
        return max(self.curves[client], key=lambda record: (record.validation, -record.round))

    def best_local(self, client: str) -> RoundRecord:
        """A client's record at its shadow's best validation round.

        Raises:
            ValueError: the simulation ran without shadows.
        """
        if any(record.local_validation is None for record in self.curves[client]):
            raise ValueError("this simulation ran without shadows")
        return max(self.curves[client], key=lambda record: (record.local_validation or 0.0, -record.round))


class MemorySpill:
    """A spill that keeps tensors in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Weights] = {}

    def put(self, client: str, tensors: Weights) -> None:
        """Keep tensors of a client."""
        self._kept[client] = tensors

    def get(self, client: str) -> Weights:
        """The tensors of a client."""
        return self._kept[client]

    def has(self, client: str) -> bool:
        """Whether the client's tensors are there."""
        return client in self._kept


@dataclass(frozen=True)
class _Party:
    """What a simulation holds fixed: the spec, everybody's secrets and data, the device."""

    spec: FederationSpec
    datasets: Mapping[str, ClientData]
    roots: Roots
    common: ImageSet | None
    device: str
    progress: Progress

    def context(self, root: bytes, number: int, spec: FederationSpec | None = None) -> RoundContext:
        """The context of one party in a round."""
        streams = Streams(root).at(self.spec.federation, number, ATTEMPT)
        return RoundContext(spec or self.spec, number, ATTEMPT, self.spec.rounds, streams, self.device, self.progress)


def simulate(
    spec: FederationSpec,
    datasets: Mapping[str, ClientData],
    roots: Roots,
    *,
    rounds: int | None = None,
    common: ImageSet | None = None,
    shadow: bool = True,
    device: str = "cpu",
    progress: Progress = silent,
    on_record: Callable[[str, RoundRecord], None] | None = None,
) -> Simulation:
    """Run a federation in this process.

    Args:
        spec: complete spec.
        datasets: per client.
        roots: secrets of all parties.
        rounds: the spec's number when None.
        common: one test set for everybody, where there is one.
        shadow: train the local-only shadow too.
        device: torch device of all training.
        progress: told about steps inside a round.
        on_record: called as soon as a client's record of a round is complete.

    Raises:
        DivergedError: a client or the student diverged.
    """
    party = _Party(spec, datasets, roots, common, device, progress)
    method, alone = get_method(spec.method), get_method("local")
    initial = initial_parts(spec, roots.cohort)
    server = method.init_server(spec, initial)
    states = {name: method.init_client(spec, initial) for name in sorted(datasets)}
    shadows = {name: alone.init_client(spec, initial) for name in states} if shadow else {}
    curves: dict[str, list[RoundRecord]] = {name: [] for name in states}
    timings: list[float] = []
    for number in range(1, (rounds or spec.rounds) + 1):
        results: dict[str, tuple[LocalResult, float]] = {}
        for name, state in states.items():
            started = time.perf_counter()
            ctx = party.context(roots.devices[name], number)
            result = method.local_round(state, datasets[name].train, server.aggregate, ctx)
            results[name] = (result, time.perf_counter() - started)
            if shadow:
                ctx = party.context(roots.devices[name], number, shadow_spec(spec))
                shadows[name] = alone.local_round(shadows[name], datasets[name].train, None, ctx).private
        states = {name: result.private for name, (result, _) in results.items()}
        started = time.perf_counter()
        server = _aggregate(party, number, server, {name: result for name, (result, _) in results.items()})
        timings.append(time.perf_counter() - started)
        for name, (result, seconds) in results.items():
            record = _record(party, name, number, result, seconds, shadows.get(name), server.aggregate)
            curves[name].append(record)
            if on_record is not None:
                on_record(name, record)
    return Simulation({name: tuple(curve) for name, curve in curves.items()}, tuple(timings), states, server.aggregate)


def update_of(client: str, result: LocalResult) -> Update:
    """What the server would decode of a local round.

    Raises:
        ValueError: the report does not tell the number of examples.
    """
    if result.report.examples is None:
        raise ValueError(f"{client}: a report without its number of examples")
    return Update(client, result.shared.parts, result.report.examples, result.report.label_counts)


def _aggregate(party: _Party, number: int, server: ServerState, results: Mapping[str, LocalResult]) -> ServerState:
    updates = {name: update_of(name, result) for name, result in results.items()}
    ctx = party.context(party.roots.coordinator, number)
    merge = get_method(party.spec.method).aggregator(server, ctx, MemorySpill())
    for update in updates.values():
        merge.add(update)
    return merge.finish({name: partial(updates.__getitem__, name) for name in updates})[1]


def _record(
    party: _Party,
    name: str,
    number: int,
    result: LocalResult,
    seconds: float,
    shadow: ClientState | None,
    aggregate: Aggregate,
) -> RoundRecord:
    spec, data, parts = party.spec, party.datasets[name], result.private.parts

    def accuracy(weights: Mapping[Part, Weights] | None, images: ImageSet | None) -> float | None:
        if weights is None or images is None or len(images) == 0:
            return None
        return evaluate(spec, weights, images, party.device).accuracy

    alone = shadow.parts if shadow is not None else None
    streams = party.context(party.roots.devices[name], number).streams.at("measure")
    generator = parts.get(Part.GENERATOR)
    return RoundRecord(
        round=number,
        accuracy=accuracy(parts, data.test) or 0.0,
        validation=accuracy(parts, data.val) or 0.0,
        common=accuracy(parts, party.common),
        accuracy_after=accuracy({**parts, **aggregate.parts}, data.test) if aggregate.parts else None,
        local_accuracy=accuracy(alone, data.test),
        local_validation=accuracy(alone, data.val),
        local_common=accuracy(alone, party.common),
        consistency=consistency(spec, parts[Part.CLASSIFIER], generator, streams) if generator else None,
        spread=generator_spread(spec, parts[Part.EXTRACTOR], generator, data.train, streams) if generator else None,
        loss=result.report.loss if result.report.loss is not None else math.nan,
        seconds=seconds,
    )
