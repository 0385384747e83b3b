"""Runs the pieces of a simulation in processes with a few torch threads each; results equal those of one process, bit for bit.

Every worker gets the data of a federation once. When a worker dies, all workers are replaced and unfinished pieces are
repeated. A piece is a pure function, so a repetition gives the same result. Pickles travel only between this process
and its own children.
"""

import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from experiments.errors import RunError
from fedcg.child_python import spawning
from fedcg.errors import FedcgError, is_of_code, told
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.tasks import Answer, Shared, Task
from fedcg.worker_process import abandon

MAX_TRIES = 3  # a task that kills three workers (probably out of memory) would kill the fourth

_party: Party  # of this worker, once started


def _begin(threads: int, party: bytes) -> None:
    """Make this process a worker."""
    global _party
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that started the simulation
    torch.set_num_threads(threads)
    _party = pickle.loads(party)  # noqa: S301 - only from the parent process


def _work(piece: bytes) -> bytes:
    """On a worker: return the result of a piece, or its exception.

    Pickled here, because the pool would put every tensor into shared memory.
    """
    try:
        function, task, shared = pickle.loads(piece)  # noqa: S301 - only from the parent process
        return pickle.dumps(function(_party, task, shared))
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the parent raises it
        return _portable(error)


def _portable(error: Exception) -> bytes:
    """Return an exception that can be raised in the parent; its text if its type can't be unpickled there."""
    if is_of_code(error):
        error = FedcgError(told(error))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an exception's own constructor may raise anything
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


class PoolRunner:
    """A runner with worker processes, which are restarted for each party.

    Args:
        workers: number of processes.
        threads: torch threads of each; one is fastest on CPUs, and gives the results of a process with one thread.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        self._count = workers
        self._threads = threads
        self._party = b""
        self._pool: ProcessPoolExecutor | None = None

    def start(self, party: Party) -> None:
        """Set a federation's data, which every worker receives at its start."""
        self.close()
        self._party = pickle.dumps(party)
        self._open()

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _open(self) -> ProcessPoolExecutor:
        given = (self._threads, self._party)
        self._pool = ProcessPoolExecutor(self._count, spawning(), initializer=_begin, initargs=given)
        return self._pool

    def answers(
        self, function: Callable[[Party, Task, Shared], Answer], tasks: Sequence[Task], shared: Shared
    ) -> Iterator[Answer]:
        """Yield answers in the order of arrival.

        Raises:
            RunError: workers died several times in a row without an answer.
        """
        left, deaths, pool = dict(enumerate(tasks)), 0, self._pool or self._open()
        while left:
            asked: dict[Future[bytes], int] = {}
            try:
                for number, task in left.items():
                    asked[pool.submit(_work, pickle.dumps((function, task, shared)))] = number
                for future in as_completed(asked):
                    answer = pickle.loads(future.result())  # noqa: S301 - from our own child
                    if isinstance(answer, Exception):
                        raise answer
                    del left[asked.pop(future)]
                    deaths = 0
                    yield answer
            except BrokenProcessPool as error:
                abandon(pool)
                deaths, pool = deaths + 1, self._open()
                if deaths == MAX_TRIES:
                    raise RunError(
                        f"{deaths} worker processes died at one task, probably out of memory: "
                        "use fewer --workers or a smaller batch"
                    ) from error
            finally:
                for future in asked:
                    future.cancel()
