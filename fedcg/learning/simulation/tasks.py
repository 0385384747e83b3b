"""The pieces of a simulated round as pure functions (a local round, a teacher pass, a client's metrics), and their runners.

A piece depends only on its arguments, which can all be pickled. Place and order of execution never change a result.
Independent of the order of rounds and of files.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol, TypeVar

from fedcg.learning import method as fl
from fedcg.learning.aggregation.sealed_means import server_half
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import downloaded_parts, protected_round
from fedcg.learning.networks.plans import shadow_spec
from fedcg.learning.privacy import OFF
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.evaluation import evaluate, generator_figures, loss_to_choose_by
from fedcg.values import Value


class LocalTask(Value):
    """One client's local round: `state` and `shadow` (local-only; None: not trained) from its last one, `votes` of all clients."""

    client: str
    number: int
    state: fl.ClientState
    shadow: fl.ClientState | None
    votes: Mapping[str, int] = field(default_factory=dict)


class LocalOutcome(Value):
    """The result of a local round.

    Attributes:
        result: None if the client could not train; its previous state is kept.
        failure: why it could not.
        shadow: the local-only model after the round (from before it if training diverged).
        seconds: of the local round, without the local-only model.
        shadow_failure: why the local-only model was not trained.
        warning: the warning for the client's owner.
    """

    client: str
    number: int
    result: fl.LocalResult | None
    failure: str | None
    shadow: fl.ClientState | None
    seconds: float
    shadow_failure: str | None = None
    warning: str | None = None


class TeacherTask(Value):
    """One update of a round, for the server's half."""

    number: int
    update: fl.Update


class MeasureTask(Value):
    """A client to evaluate after a round: its parts before the download, its local-only model and the moving average (`ema`)."""

    client: str
    number: int
    parts: fl.Parts
    shadow: fl.Parts | None
    averaged: fl.Parts | None = None


class RoundRecord(Value):
    """One client after one round. A metric is None without data for it.

    Attributes:
        round: counted from 1.
        accuracy: on its own test images, before the download. `validation` (with `validation_loss`), `common` likewise.
        accuracy_after: on its own test images, with this round's aggregate loaded; None without shared parts.
        local_accuracy: of the local-only model on its own test images (None without one); `local_validation`,
            `local_common` likewise.
        consistency: share of its generated features that its classifier recognises; None without a generator.
        spread: mean std(G) / std(F) of its generator.
        accuracy_ema: of the moving average, on its own test images; `common_ema` likewise.
        common_after: as `accuracy_after`, on the common test images.
        losses: calibrated validation losses of the candidate models: "own", "ema", "downloaded", "local".
        loss: mean training cross-entropy; None if it did not train in this round.
        seconds: of the local round, without local-only model and evaluation; None if it did not train.
    """

    round: int
    accuracy: float | None
    validation: float | None
    validation_loss: float | None
    common: float | None
    accuracy_after: float | None
    local_accuracy: float | None
    local_validation: float | None
    local_validation_loss: float | None
    local_common: float | None
    consistency: float | None
    spread: float | None
    accuracy_ema: float | None = None
    common_ema: float | None = None
    common_after: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    seconds: float | None = None


class MemorySpill:
    """A spill that keeps tensors in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, fl.Weights] = {}

    def put(self, client: str, tensors: fl.Weights) -> None:
        """Store a client's tensors."""
        self._kept[client] = tensors

    def get(self, client: str) -> fl.Weights:
        """The tensors of a client."""
        return self._kept[client]

    def has(self, client: str) -> bool:
        """Whether the client's tensors are stored."""
        return client in self._kept


def local_task(party: Party, task: LocalTask, aggregate: fl.Aggregate) -> LocalOutcome:
    """One client's local round, and its local-only model's on the same streams.

    A client that diverges or has too few images returns a failure instead of a result.
    """
    method, told = get_method(party.spec.method), list[str]()
    data = party.datasets[task.client].train
    ctx = replace(_context(party, task), callbacks=fl.Callbacks(warn=told.append))
    result, failure, seconds = _attempt(method, task.state, data, aggregate, ctx)
    shadow, shadow_failure = task.shadow, None
    if task.shadow is not None and party.spec.trains_in(task.number):
        alone = replace(ctx, spec=shadow_spec(ctx.spec), privacy=OFF)
        trained, shadow_failure, _ = _attempt(get_method("local"), task.shadow, data, None, alone)
        shadow = trained.private if trained else task.shadow
    warning = "; ".join(told) or None
    return LocalOutcome(task.client, task.number, result, failure, shadow, seconds, shadow_failure, warning)


def _context(party: Party, task: LocalTask) -> fl.RoundContext:
    ctx = party.client_context(task.client, task.number)
    return replace(ctx, cohort=replace(ctx.cohort, votes=task.votes))


def vote_task(party: Party, task: LocalTask, aggregate: fl.Aggregate) -> tuple[str, int]:
    """(client, its vote) before a round, on the round's starting aggregate."""
    method = get_method(party.spec.method)
    assert method.vote is not None
    return task.client, method.vote(task.state, aggregate, party.datasets[task.client].train, _context(party, task))


def _attempt(
    method: fl.Method, state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> tuple[fl.LocalResult | None, str | None, float]:
    """The result of a local round, or the reason why there is none, and its seconds."""
    started, result, failure = time.perf_counter(), None, None
    try:
        result = protected_round(method, state, data, aggregate, ctx)
        fl.check_finite(result.private.parts, "after the round")
    except (fl.DivergedError, DataError) as error:
        result, failure = None, str(error)
    return result, failure, time.perf_counter() - started


def teacher_task(party: Party, task: TeacherTask, server: fl.ServerState) -> tuple[str, fl.Weights]:
    """(client, the rows that `aggregator.add(update)` spills); no rows if the method's server half spills nothing."""
    client, spill = task.update.client, MemorySpill()
    server_half(get_method(party.spec.method), server, party.server_context(task.number), spill).add(task.update)
    return client, spill.get(client) if spill.has(client) else {}


def measure_task(party: Party, task: MeasureTask, aggregate: fl.Aggregate) -> tuple[str, RoundRecord]:
    """(client, its metrics) after a round, without those of the local round (loss, seconds)."""
    spec, data, parts = party.spec_of(task.client), party.datasets[task.client], task.parts
    common = party.common_of(task.client)

    def measured(of: FederationSpec, weights: fl.Parts | None, images: ImageSet | None) -> fl.Evaluation | None:
        if weights is None or images is None or len(images) == 0:
            return None
        return evaluate(of, weights, images, party.device)

    def accuracy(of: FederationSpec, weights: fl.Parts | None, images: ImageSet | None) -> float | None:
        found = measured(of, weights, images)
        return None if found is None else found.accuracy

    def loss(of: FederationSpec, weights: fl.Parts | None) -> float | None:
        if weights is None or len(data.val) == 0:
            return None
        return loss_to_choose_by(of, weights, data.val, party.device)

    alone = shadow_spec(spec)
    val, local_val = measured(spec, parts, data.val), measured(alone, task.shadow, data.val)
    ctx = party.client_context(task.client, task.number)
    figures = generator_figures(spec, parts, data.train, ctx.streams.at("measure"))
    changed = downloaded_parts(parts, aggregate, data.train, replace(ctx, round=task.number + 1))
    downloaded = {**parts, **changed} if changed else None
    losses = {
        "own": loss(spec, parts),
        "ema": loss(spec, task.averaged),
        "downloaded": loss(spec, downloaded),
        "local": loss(alone, task.shadow),
    }
    return task.client, RoundRecord(
        round=task.number,
        accuracy=accuracy(spec, parts, data.test),
        validation=None if val is None else val.accuracy,
        validation_loss=None if val is None else val.loss,
        common=accuracy(spec, parts, common),
        accuracy_after=accuracy(spec, downloaded, data.test),
        local_accuracy=accuracy(alone, task.shadow, data.test),
        local_validation=None if local_val is None else local_val.accuracy,
        local_validation_loss=None if local_val is None else local_val.loss,
        local_common=accuracy(alone, task.shadow, common),
        consistency=figures.get("consistency"),
        spread=figures.get("spread"),
        accuracy_ema=accuracy(spec, task.averaged, data.test),
        common_ema=accuracy(spec, task.averaged, common),
        common_after=accuracy(spec, downloaded, common),
        losses={name: value for name, value in losses.items() if value is not None},
    )


Task = TypeVar("Task", LocalTask, TeacherTask, MeasureTask)
Shared = TypeVar("Shared")
Answer = TypeVar("Answer")


class Runner(Protocol):
    """Runs the pieces of a simulation: in this process, a pool of processes or a cluster.

    Laws: every task is answered exactly once, in any order; a piece's exception reaches the caller; a worker that dies
        is replaced and its task repeated.
    """

    def start(self, party: Party) -> None:
        """Load the data of a federation; called once before the first round of each federation."""

    def answers(
        self, function: Callable[[Party, Task, Shared], Answer], tasks: Sequence[Task], shared: Shared
    ) -> Iterator[Answer]:
        """`function(party, task, shared)` of every task."""

    def close(self) -> None:
        """Release all resources. The runner can't be used afterwards."""


class SerialRunner:
    """Runs all pieces in this process, one after the other."""

    def __init__(self) -> None:
        self._party: Party | None = None

    def start(self, party: Party) -> None:
        """Store the party."""
        self._party = party

    def answers(
        self, function: Callable[[Party, Task, Shared], Answer], tasks: Sequence[Task], shared: Shared
    ) -> Iterator[Answer]:
        """Return answers in the given order."""
        party = self._party
        assert party is not None
        return (function(party, task, shared) for task in tasks)

    def close(self) -> None:
        """Drop the party."""
        self._party = None
