"""Background work: the parent's side of a child process that loads torch, and threads that repeat a task. Torch-free.

One thread reads the child's reports and another writes requests: a busy child does not read, and the pipe may be full in both directions.
"""

import contextlib
import ctypes
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

from fedcg.child_python import module_command
from fedcg.values import Value

POLL_S = 0.5
START_S = 120.0
"""Time for a child's first report: it loads torch first, which takes long on a busy machine."""
STALL_S = 900.0
"""Longer than the slowest acceptable step, load or merge."""
STOP_S = 1.0
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Rested(Value):
    """Report: the child has handled this number of requests and waits for the next one."""

    handled: int


class Exited(Value):
    """The child has ended.

    Attributes:
        reason: why the parent ended it, if it hung.
        was_busy: it had not reported the end of all requests, or had not started yet.
    """

    pid: int
    exit_code: int | None
    reason: str = ""
    was_busy: bool = True


@dataclass(eq=False)
class WorkerProcess:
    """Runs one child at a time.

    Args:
        name: of the process and its threads.
        main: the child's entry point; receives its end of the pipe, and the arguments.
        arguments: values that can be pickled.
        stall_s: a child that has work and reports nothing for this time is killed.
        deliver: receives every report except `Rested`, and finally `Exited`, on a thread; must only enqueue.
    """

    name: str
    main: Callable[..., None]
    arguments: tuple[Any, ...]
    stall_s: float
    deliver: Callable[[Any], None]
    _child: "_Child | None" = field(default=None, init=False)

    def start(self) -> int:
        """Start a child instead of an earlier one, and return its process id.

        Raises:
            OSError: no memory or no process is available.
        """
        self.stop()
        ours, theirs = Pipe()
        with theirs:
            command = module_command("fedcg.worker_process", self.name, os.getpid(), theirs.fileno())
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._child = _Child(process, ours, (self.main, self.arguments), self.stall_s, self.deliver)
        for work in (self._child.read, self._child.write):
            threading.Thread(target=work, name=f"{self.name}-{work.__name__}", daemon=True).start()
        return process.pid

    def send(self, request: object) -> None:
        """Send the child a request; never blocks. A child that just died reports its end instead."""
        if self._child is not None:
            self._child.send(request)

    def stop(self) -> None:
        """End a running child at once. Nothing more of it is delivered, not even `Exited`."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()


@dataclass(eq=False)
class _Child:
    """One child from its start to its end."""

    process: subprocess.Popen[bytes]
    connection: Connection
    work: object
    stall_s: float
    deliver: Callable[[Any], None]

    def __post_init__(self) -> None:
        self._requests: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._requests.put(self.work)
        self._reason = ""  # why the parent ended it
        self._is_stopped = False
        self._asked, self._handled = 0, -1  # -1 until it is ready
        self._quiet_since = time.monotonic() + max(0.0, START_S - self.stall_s)

    def send(self, request: object) -> None:
        self._quiet_since = max(self._quiet_since, time.monotonic())
        self._asked += 1
        self._requests.put(request)

    def stop(self) -> None:
        self._is_stopped = True
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)

    @property
    def is_busy(self) -> bool:
        return self._asked != self._handled

    def write(self) -> None:
        with contextlib.suppress(OSError):  # it is gone; `read` notices
            while (request := self._requests.get()) is not None:
                self.connection.send(request)

    def read(self) -> None:
        try:
            self._follow()
        except (EOFError, ConnectionError):
            pass  # it is gone
        except Exception as error:  # noqa: BLE001 - the run loop of a thread: without it, the process would never end
            self._reason = f"its reports can't be read ({type(error).__name__}: {error})"
            _log.exception("process %s is ended: its reports can't be read", self.process.pid)
            self.process.kill()
        self._requests.put(None)
        self._report(Exited(self.process.pid, self.process.wait(), self._reason, self.is_busy))

    def _follow(self) -> None:
        while True:
            while not self.connection.poll(POLL_S):
                if not self._reason and self.is_busy and time.monotonic() - self._quiet_since > self.stall_s:
                    self._reason = f"no progress for {self.stall_s:g} s"
                    self.process.kill()  # also ends a stopped process
            report = self.connection.recv()
            self._quiet_since = time.monotonic()
            if isinstance(report, Rested):
                self._handled = report.handled
            else:
                self._report(report)

    def _report(self, report: object) -> None:
        if not self._is_stopped:
            self.deliver(report)


def requests_of(connection: Connection) -> Iterator[Any]:
    """In the child: the parent's requests, until the parent is gone. Take the next one when a request is done."""
    with contextlib.suppress(EOFError, OSError):
        for handled in itertools.count():
            connection.send(Rested(handled))
            yield connection.recv()


def run_child() -> None:
    """Run the child. `WorkerProcess` passes its name, its parent's process id and its end of the pipe."""
    _, parent, descriptor = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the parent, which ends this process
    connection = Connection(int(descriptor))
    main, arguments = connection.recv()
    main(connection, *arguments)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that started it ends in any way (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def abandon(pool: ProcessPoolExecutor) -> None:
    """Kill a pool's processes and end the pool at once; unfinished futures never finish.

    The thread that sends tasks may be in the middle of a large one. CPython before 3.11.7 and 3.12.1 then waits forever (gh-94777),
    because no process reads and this one holds the pipe's other end open. Later versions close that end.
    """
    for process in list((pool._processes or {}).values()):  # noqa: SLF001 - only Python 3.14 has `kill_workers`
        process.kill()
    waits_for_ever = sys.version_info < (3, 11, 7) or (3, 12) <= sys.version_info < (3, 12, 1)
    if waits_for_ever and (queue := pool._call_queue) is not None:  # type: ignore[attr-defined]  # noqa: SLF001
        queue._reader.close()  # noqa: SLF001
    with contextlib.suppress(OSError):  # Python 3.11.2 may close a pipe that the pool's thread has just closed
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    run_child()


@contextmanager
def repeating(name: str, work: Callable[[], float]) -> Iterator[None]:
    """Repeat the work while the context lasts. Its end does not wait for work in progress.

    Args:
        name: of the thread.
        work: returns how many seconds to wait before the next time; must catch its own errors.
    """
    stopping = threading.Event()

    def run() -> None:
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = work()

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        yield
    finally:
        stopping.set()
