"""Processes of this program that are forked from one that has loaded its packages: each saves half a second of a CPU.

The fork server is multiprocessing's: it imports the packages once, starts no thread, and ends when this process does; the kernel then ends
its children (`prctl`). A child is a process like one that was started anew, with its own arguments, environment, log and process group.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ("coordinator.cli.coordinator_commands", "edge_client.agent.run", "edge_client.cli.agent_commands")
_PR_SET_PDEATHSIG = 1


def fork_server() -> ForkServerContext:
    """The context of forked processes, whose server begins to load at once."""
    os.environ["PYTHONSAFEPATH"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    from multiprocessing.forkserver import ensure_running

    ensure_running()
    return context


class Forked:
    """A forked process with the face of asyncio's."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative where a signal ended it; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def run_command(arguments: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
    """What a forked process does: one command of this program."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.environ.update(environment)
    with Path(os.devnull).open("rb") as nothing, log.open("ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(at, mode, buffering=1, closefd=False) for at, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.argv = ["fedcg", *arguments]
    from fedcg.cli import main

    main()
