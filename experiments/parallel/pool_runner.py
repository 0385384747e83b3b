"""Runs the pieces of a simulation in processes of a few torch threads each; same results as in one process, bit for bit.

Every worker gets the data of a federation once. A worker that dies is replaced and its task repeated: a piece is a pure
function, so a repetition gives the same result. Pickles travel only between this process and its own children.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from experiments.errors import RunError
from fedcg.learning.method import Aggregate, ServerState, Update, Weights
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.tasks import (
    LocalOutcome,
    LocalTask,
    MeasureTask,
    RoundRecord,
    local_task,
    measure_task,
    teacher_task,
)

MAX_TRIES = 3  # a task that kills three workers (out of memory, most likely) would kill the fourth
_JOIN_S = 5.0

_Piece = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments after the party."""


def _work(connection: Connection, threads: int) -> None:
    """A worker's life: a party or a piece comes in, an outcome or an exception goes out, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started the simulation
    torch.set_num_threads(threads)
    party: Party | None = None
    while True:
        try:
            received = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the parent process alone
        except (EOFError, OSError):
            return
        if isinstance(received, Party):
            party = received
            continue
        assert party is not None
        try:
            function, arguments = received
            answer = pickle.dumps(function(party, *arguments))
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the parent raises it
            answer = _portable(error)
        try:
            connection.send_bytes(answer)
        except OSError:
            return  # the parent is gone


def _portable(error: Exception) -> bytes:
    """An exception as it can be raised on the other side; its text where its type can't be made there from a pickle."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever an exception's own constructor raises
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


class _Worker:
    """One process and this side's end of its pipe."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_work, args=(theirs, threads), daemon=True)
        self.process.start()
        theirs.close()
        self.piece: int | None = None

    def give(self, message: bytes) -> bool:
        """Send a message; whether the worker was there to take it."""
        try:
            self.connection.send_bytes(message)
        except OSError:
            return False
        return True

    def answer(self) -> Any:
        """What it worked out, or the exception that it met.

        Raises:
            EOFError: it died.
        """
        try:
            return pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from our own child
        except OSError as error:
            raise EOFError from error

    def end(self) -> None:
        """Stop it."""
        self.connection.close()
        self.process.kill()
        self.process.join(_JOIN_S)
        self.process.close()


class PoolRunner:
    """A runner with worker processes, started with the first party.

    Args:
        workers: how many.
        threads: torch threads of each; one is fastest on CPUs, and what makes results equal to a process with one thread.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        self._count = workers
        self._threads = threads
        self._party = b""
        self._workers: list[_Worker] = []

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def start(self, party: Party) -> None:
        """Hand a federation's data to every worker; starts them when there are none yet."""
        self._party = pickle.dumps(party)
        for index, worker in enumerate(self._workers):
            if worker.piece is not None or not worker.give(self._party):
                self._replace(index)
        fresh = [_Worker(self._threads) for _ in range(self._count - len(self._workers))]
        for worker in fresh:  # all of them start before the first one has read its data
            worker.give(self._party)
        self._workers += fresh

    def local(self, tasks: Sequence[LocalTask], aggregate: Aggregate) -> Iterator[LocalOutcome]:
        """Local rounds, in the order in which they end."""
        return self._all([(local_task, (task, aggregate)) for task in tasks])

    def teach(self, number: int, server: ServerState, updates: Sequence[Update]) -> Iterator[tuple[str, Weights]]:
        """Teacher passes, in the order in which they end."""
        return self._all([(teacher_task, (number, server, update)) for update in updates])

    def measure(self, tasks: Sequence[MeasureTask], aggregate: Aggregate) -> Iterator[tuple[str, RoundRecord]]:
        """Figures, in the order in which they end."""
        return self._all([(measure_task, (task, aggregate)) for task in tasks])

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = _Worker(self._threads)
        self._workers[index].give(self._party)

    def _all(self, pieces: Sequence[_Piece]) -> Iterator[Any]:
        """The answer to every piece.

        Raises:
            RunError: a piece ended several workers.
        """
        for index, worker in enumerate(self._workers):
            if worker.piece is not None:
                self._replace(index)  # at work on something whose asker has gone
        waiting, tries = deque(range(len(pieces))), [0] * len(pieces)
        left = len(pieces)
        while left:
            for index, worker in enumerate(self._workers):
                if worker.piece is None and waiting:
                    piece = waiting.popleft()
                    tries[piece] += 1
                    if not worker.give(pickle.dumps(pieces[piece])):
                        self._replace(index)
                        waiting.appendleft(piece)
                        _check_tries(tries[piece])
                        continue
                    worker.piece = piece
            ready = wait([worker.connection for worker in self._workers if worker.piece is not None])
            for index, worker in enumerate(self._workers):
                if worker.connection not in ready or worker.piece is None:
                    continue
                piece, worker.piece = worker.piece, None
                try:
                    answer = worker.answer()
                except EOFError:
                    self._replace(index)
                    waiting.appendleft(piece)
                    _check_tries(tries[piece])
                    continue
                if isinstance(answer, Exception):
                    raise answer
                left -= 1
                yield answer


def _check_tries(tries: int) -> None:
    if tries >= MAX_TRIES:
        raise RunError(
            f"{tries} worker processes died over one task, probably for want of memory: use fewer --workers or a smaller batch"
        )
