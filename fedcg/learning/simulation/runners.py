"""Who runs the pieces of a simulation: the protocol, and the runner that stays in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from fedcg.learning.method import Aggregate, ServerState, Update, Weights
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.tasks import (
    LocalOutcome,
    LocalTask,
    MeasureTask,
    RoundRecord,
    local_task,
    local_tasks,
    measure_task,
    teacher_task,
)


class Runner(Protocol):
    """Who runs the pieces of a simulation: this process, a pool of processes, a cluster.

    Laws: every task is answered exactly once, in any order; an exception that a piece raises reaches the caller; a worker that
    dies is replaced and its task repeated.
    """

    def start(self, party: Party) -> None:
        """Take the data of a federation; called once before its first round, again before the next federation's."""

    def local(self, tasks: Sequence[LocalTask], aggregate: Aggregate) -> Iterator[LocalOutcome]:
        """`local_task` of every task."""

    def teach(self, number: int, server: ServerState, updates: Sequence[Update]) -> Iterator[tuple[str, Weights]]:
        """`teacher_task` of every update."""

    def measure(self, tasks: Sequence[MeasureTask], aggregate: Aggregate) -> Iterator[tuple[str, RoundRecord]]:
        """`measure_task` of every task."""

    def close(self) -> None:
        """Give everything back; the runner can't be used afterwards."""


class SerialRunner:
    """Runs everything in this process, one piece after the other.

    Args:
        batched: local rounds of all clients together, where the method can: fast on a GPU, slower on a CPU, and with other last
            digits. None: on a GPU.
    """

    def __init__(self, *, batched: bool | None = False) -> None:
        self._batched = batched
        self._party: Party | None = None

    @property
    def _started(self) -> Party:
        if self._party is None:
            raise RuntimeError("the runner was not started")
        return self._party

    def start(self, party: Party) -> None:
        """Keep the party."""
        self._party = party

    def local(self, tasks: Sequence[LocalTask], aggregate: Aggregate) -> Iterator[LocalOutcome]:
        """Local rounds in the order given."""
        on_cuda = torch.device(self._started.device).type == "cuda"
        if on_cuda if self._batched is None else self._batched:
            return iter(local_tasks(self._started, tasks, aggregate))
        return (local_task(self._started, task, aggregate) for task in tasks)

    def teach(self, number: int, server: ServerState, updates: Sequence[Update]) -> Iterator[tuple[str, Weights]]:
        """Teacher passes in the order given."""
        return (teacher_task(self._started, number, server, update) for update in updates)

    def measure(self, tasks: Sequence[MeasureTask], aggregate: Aggregate) -> Iterator[tuple[str, RoundRecord]]:
        """Figures in the order given."""
        return (measure_task(self._started, task, aggregate) for task in tasks)

    def close(self) -> None:
        """Forget the party."""
        self._party = None
