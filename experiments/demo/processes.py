"""Starts the processes of a demo or a bench, writes their output to log files, and stops all of them.

Every child leads its own process group, so that its children stop with it. On Linux the kernel kills it when this
process dies for any reason (`prctl`).

Children are forked from the fork server of multiprocessing, which starts no thread and exits with this process.
Preloaded packages save each child half a second of CPU time. A child has its own arguments, environment, log and
process group, like a newly started process.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from experiments.errors import ProcessError
from fedcg.values import Value
from fedcg.worker_process import die_with_parent

PRELOADED = ("coordinator.cli.coordinator_commands", "edge_client.agent.run", "edge_client.cli.agent_commands")
STOP_S = 8.0
POLL_S = 0.03
TAIL_LINES = 15
# One torch thread per process: on few cores two threads in one process are slower than one thread in each of two.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def fork_server(preloaded: Sequence[str]) -> ForkServerContext:
    """Return the context of forked processes, whose server starts to load packages immediately."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if preloaded:
        os.environ.update(ONE_THREAD)  # else numpy starts threads, which do not survive a fork
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    from multiprocessing.forkserver import ensure_running

    ensure_running()
    return context


def run_command(*arguments: str) -> None:
    """Run one command of this program in this process."""
    sys.argv = ["fedcg", *arguments]
    from fedcg.cli import main

    main()


def _run(target: Callable[..., object], arguments: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
    """Run in a forked process."""
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGTERM)
    os.environ.update(environment)
    with Path(os.devnull).open("rb") as nothing, log.open("ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(at, mode, buffering=1, closefd=False) for at, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    target(*arguments)


class Child(Value):
    """A started process and its log file; its output starts at byte `offset`.

    Attributes:
        outlives_others: whether it is stopped after all others, which publish their last messages through it.
    """

    name: str
    process: BaseProcess
    log: Path
    offset: int
    outlives_others: bool

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process.exitcode is None

    def lines(self) -> list[str]:
        """Return its lines of output so far."""
        return self.log.read_bytes()[self.offset :].decode(errors="replace").splitlines()

    def ended_too_early(self) -> ProcessError:
        """Return the error with its exit code and last lines."""
        last = "\n".join(self.lines()[-TAIL_LINES:])
        return ProcessError(f"{self.name} exited with code {self.process.exitcode}; see {self.log}:\n{last}")


class Children:
    """The processes of one demo or bench.

    Args:
        logs: folder for `NAME.log`.
        preloaded: names of the modules that the fork server loads.
    """

    def __init__(self, logs: Path, preloaded: Sequence[str]) -> None:
        self._logs = logs
        self._all: list[Child] = []
        self._server = fork_server(preloaded)
        logs.mkdir(parents=True, exist_ok=True)

    def fork(
        self,
        name: str,
        *arguments: str | Path,
        outlives_others: bool = False,
        target: Callable[..., object] = run_command,
    ) -> Child:
        """Start a command of this program, or another function of its arguments, in the background."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            offset = output.tell()
        given = (target, tuple(map(str, arguments)), ONE_THREAD, log)
        process = self._server.Process(target=_run, args=given, name=name)
        process.start()
        child = Child(name, process, log, offset, outlives_others)
        self._all.append(child)
        return child

    async def line(self, child: Child, wanted: str, deadline_s: float) -> list[str]:
        """Wait until a process has printed a line that starts with `wanted`; return all its lines.

        Raises:
            ProcessError: it exited before, or the deadline passed.
        """
        end = time.monotonic() + deadline_s
        while True:
            lines = child.lines()
            if any(line.startswith(wanted) for line in lines):
                return lines
            if not child.is_running:
                raise child.ended_too_early()
            if time.monotonic() > end:
                raise ProcessError(f"{child.name} did not print {wanted!r} within {deadline_s:.0f} s; see {child.log}")
            await asyncio.sleep(POLL_S)

    def stop_all(self) -> None:
        """Stop all started processes, those that outlive the others last; blocks meanwhile.

        First with SIGTERM (they stop their own children); after `STOP_S` the rest of their groups with SIGKILL.
        """
        for outlives_others in (False, True):
            some = [child for child in self._all if child.outlives_others is outlives_others]
            for child in some:
                if child.is_running:
                    child.process.terminate()
            end = time.monotonic() + STOP_S
            for child in some:
                child.process.join(max(0.0, end - time.monotonic()))
            for child in some:
                _kill_group(child)
                child.process.join()


def _kill_group(child: Child) -> None:
    """Kill the rest of a child's process group.

    While a member of the group lives, the kernel does not reuse its number. So if the child is gone and its number is
    in use again, the group was empty and the number belongs to another process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not child.is_running and psutil.pid_exists(child.pid):
            return
        os.killpg(child.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def children(logs: Path, preloaded: Sequence[str] = ()) -> AsyncIterator[Children]:
    """Yield processes that are all stopped at the end of the block, in every case.

    SIGTERM and SIGHUP leave the block like Ctrl-C.
    """
    started = Children(logs, preloaded)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
    try:
        yield started
    finally:
        await asyncio.shield(asyncio.to_thread(started.stop_all))
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
