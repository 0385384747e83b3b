"""Runs the pieces of a simulation in processes of a few torch threads each; same results as in one process, bit for bit.

Every worker gets the data of a federation once. When a worker dies, all are replaced and what is unfinished is repeated: a piece is
a pure function, so a repetition gives the same result. Pickles travel only between this process and its own children.
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

MAX_TRIES = 3  # a task that kills three workers (out of memory, most likely) would kill the fourth

_party: Party  # of this worker, once it has begun


def _begin(threads: int, party: bytes) -> None:
    """Make this process a worker."""
    global _party
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started the simulation
    torch.set_num_threads(threads)
    _party = pickle.loads(party)  # noqa: S301 - from the parent process alone


def _work(piece: bytes) -> bytes:
    """On a worker: what a piece came to, or the exception that it met.

    Pickled here and not by the pool, which would put every tensor into shared memory.
    """
    try:
        function, task, shared = pickle.loads(piece)  # noqa: S301 - from the parent process alone
        return pickle.dumps(function(_party, task, shared))
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the parent raises it
        return _portable(error)


def _portable(error: Exception) -> bytes:
    """An exception as it can be raised on the other side; its text where its type can't be made there from a pickle."""
    if is_of_code(error):
        error = FedcgError(told(error))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever an exception's own constructor raises
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


class PoolRunner:
    """A runner with worker processes, which are started anew for each party.

    Args:
        workers: how many.
        threads: torch threads of each; one is fastest on CPUs, and what makes results equal to a process with one thread.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        self._count = workers
        self._threads = threads
        self._party = b""
        self._pool: ProcessPoolExecutor | None = None

    def start(self, party: Party) -> None:
        """Take a federation's data, which every worker gets as it begins."""
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
        """Answers in the order in which they come.

        Raises:
            RunError: workers died several times without an answer between.
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
                        f"{deaths} worker processes died over one task, probably for want of memory: "
                        "use fewer --workers or a smaller batch"
                    ) from error
            finally:
                for future in asked:
                    future.cancel()
