"""How long a simulation runs, and where it stands after a round. Values only: they train nothing and touch no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedcg.learning.mechanisms.accountant import Spent
from fedcg.learning.method import Aggregate, ClientState, ServerState, SharedResult, Update
from fedcg.learning.simulation.tasks import RoundRecord
from fedcg.learning.training.evaluation import is_preferred
from fedcg.wire.parts import Report

Updates = Mapping[str, Update]
Screen = Callable[[int, Updates, Aggregate], Updates]
"""(round, the updates by client, the aggregate that they started from) -> the updates that are merged."""


@dataclass(frozen=True)
class Schedule:
    """How long a simulation runs and what is done beside the training.

    Attributes:
        rounds: the spec's number when None.
        shadow: train a local-only shadow of every client too; the method `local` has none, it is its own.
        evaluate_every: clients are measured after every so many rounds, and after the last.
        participation: share of the clients that take part in a round, in (0, 1].
        early_stop: end after so many rounds without a better validation of any client; None: never.
        kept_updates: rounds whose updates stay in `Simulation.sent`.
        screen: what the server does to a round's updates before it merges them; None: nothing.
    """

    rounds: int | None = None
    shadow: bool = True
    evaluate_every: int = 1
    participation: float = 1.0
    early_stop: int | None = None
    kept_updates: frozenset[int] = frozenset()
    screen: Screen | None = None


@dataclass(frozen=True)
class Sent:
    """A client's update before it is coded: the shared parts, and all that it could report."""

    shared: SharedResult
    report: Report


@dataclass(frozen=True)
class Failure:
    """A client that could not train in a round, or warned, or the server that could not merge, and why."""

    round: int
    reason: str


@dataclass(frozen=True)
class Simulation:
    """Where a simulation stands after some rounds; at its end, the outcome.

    Attributes:
        rounds: how many are done.
        server: what the server keeps; `states` and `shadows` what the clients keep.
        curves: one record per client and measured round.
        failures: rounds in which a client could not train; `shadow_failures` its shadow; `server_failures` the student.
        warnings: what owners of clients would be told, by client.
        aggregate_seconds: of each round.
        global_accuracy: (round, accuracy) of the average of all clients' models, for measured rounds.
        update_bytes: of each round, mean over its updates as they were coded; 0 where there were none. Empty without a coding.
        spent: what the DP-SGD of each client has spent; empty without.
        ended_early: validation stood still for as long as the schedule allows.
        sent: by client, the updates of the last round where the schedule keeps them. No checkpoint holds them.
    """

    rounds: int
    server: ServerState
    states: Mapping[str, ClientState]
    shadows: Mapping[str, ClientState]
    curves: Mapping[str, tuple[RoundRecord, ...]]
    failures: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    shadow_failures: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    warnings: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    server_failures: tuple[Failure, ...] = ()
    aggregate_seconds: tuple[float, ...] = ()
    global_accuracy: tuple[tuple[int, float], ...] = ()
    update_bytes: tuple[int, ...] = ()
    spent: Mapping[str, Spent] = field(default_factory=dict)
    ended_early: bool = False
    sent: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def aggregate(self) -> Aggregate:
        """The last aggregate."""
        return self.server.aggregate

    def best(self, client: str) -> RoundRecord:
        """A client's record at its best validation round: by accuracy, then loss, the first of equals."""
        return _best(self.curves[client], lambda record: (record.validation, record.validation_loss))

    def best_local(self, client: str) -> RoundRecord:
        """A client's record at its shadow's best validation round.

        Raises:
            ValueError: the simulation ran without shadows.
        """
        if client not in self.shadows:
            raise ValueError("this simulation ran without shadows")
        return _best(self.curves[client], lambda record: (record.local_validation, record.local_validation_loss))


def _best(
    curve: Sequence[RoundRecord], figures: Callable[[RoundRecord], tuple[float | None, float | None]]
) -> RoundRecord:
    best = curve[0]
    for record in curve[1:]:
        if is_preferred(*figures(record), *figures(best)):
            best = record
    return best
