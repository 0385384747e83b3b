"""Chooses who trains in a simulation: this process, or a pool of processes. Imports no torch until one is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcg.learning.runners import Runner


def default_workers(clients: int, device: str) -> int:
    """One per CPU of this process, at most one per client; one for an accelerator, which processes would only share."""
    return min(len(os.sched_getaffinity(0)), clients) if device == "cpu" else 1


@contextmanager
def open_runner(workers: int, threads: int) -> Iterator[Runner]:
    """A runner, closed at the end of the block.

    Args:
        workers: processes; 1 stays in this one.
        threads: torch threads of each.
    """
    from experiments.pool_runner import PoolRunner
    from fedcg.learning.runners import SerialRunner

    runner: Runner = SerialRunner() if workers == 1 else PoolRunner(workers, threads)
    try:
        yield runner
    finally:
        runner.close()
