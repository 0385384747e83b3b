"""The training process as the agent sees it: started, told what to do, listened to, replaced when it dies. Torch-free.

Only the child imports torch. The child dies with the agent: by the kernel's parent-death signal where there is one, and by
the end of its pipe everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from edge_client.config import AgentConfig
from edge_client.training.messages import Exited, TrainerCommand, TrainerReport, Working
from fedcg.worker_process import POLL_S, Watchdog

_PR_SET_PDEATHSIG = 1
_STOP_S = 2.0


class TrainerHandle(Protocol):
    """A training process, or what a test puts in its place."""

    def start(self) -> int:
        """Start (again) and return the process id; reports come through the callback given at construction."""

    def send(self, command: TrainerCommand) -> None:
        """Tell the process what to do next."""

    def stop(self) -> None:
        """End the process, if it runs; what it had not committed is repeated another time."""


class TrainerProcess:
    """A spawned process that trains; one that hangs is killed.

    Args:
        config: of the device.
        deliver: called from a thread of the handle with every report; must only enqueue.
    """

    def __init__(self, config: AgentConfig, deliver: Callable[[TrainerReport], None]) -> None:
        self._config = config
        self._deliver = deliver
        self._watchdog = Watchdog(config.training.stall_s)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> int:
        """Start (again) and return the process id."""
        self.stop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=run_child, args=(theirs, self._config, os.getpid()), name="fedcg-trainer", daemon=True
        )
        process.start()
        theirs.close()
        self._process, self._connection, self._watchdog = process, ours, Watchdog(self._config.training.stall_s)
        told = (process, ours, self._watchdog)
        listener = threading.Thread(target=self._listen, args=told, name="trainer-reports", daemon=True)
        listener.start()
        assert process.pid is not None
        return process.pid

    def send(self, command: TrainerCommand) -> None:
        """Tell the process what to do next; a process that just died reports its end instead."""
        if self._connection is not None:
            self._watchdog.alive()
            with contextlib.suppress(OSError):
                self._connection.send(command)

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join(_STOP_S)

    def _listen(self, process: multiprocessing.process.BaseProcess, connection: Connection, watchdog: Watchdog) -> None:
        reason = ""
        while True:
            try:
                while not connection.poll(POLL_S):
                    if watchdog.is_hanging() and not reason:
                        reason = watchdog.reason
                        process.kill()  # also ends a stopped process
                report: TrainerReport | Working = connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(report, Working):
                watchdog.alive()
            else:
                watchdog.rest()
                self._deliver(report)
        process.join()
        connection.close()
        self._deliver(Exited(process.pid or 0, process.exitcode, reason))


def run_child(connection: Connection, config: AgentConfig, parent: int) -> None:
    """Entry point of the child: tie its life to the agent's, then load torch and work."""
    die_with_parent(parent)
    # Ctrl-C in a terminal reaches the agent, which ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from edge_client.training.trainer_child import trainer_main

    trainer_main(connection, config)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)
