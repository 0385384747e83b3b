"""Chooses who runs simulations: this process, a pool of processes, or a Ray cluster. Imports no torch until it is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from experiments.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.simulation.batch import RunSetting
    from experiments.simulation.single_run import Simulator
    from fedcg.learning.simulation.tasks import Runner


@dataclass(frozen=True)
class Lanes:
    """How the runs of a batch are done.

    Attributes:
        simulator: who runs one; threads may call it at once where `count` is more than 1.
        count: how many at once.
        stopping: set to end those that are under way.
    """

    simulator: Simulator
    count: int = 1
    stopping: Event = field(default_factory=Event)


def default_workers(clients: int, device: str) -> int:
    """One per CPU of this process, at most one per client; one for an accelerator, which processes would only share."""
    return min(len(os.sched_getaffinity(0)), clients) if device == "cpu" else 1


@contextmanager
def open_lanes(workers: int, threads: int, *, batched: bool | None = None) -> Iterator[Lanes]:
    """One run at a time on this machine; everything is closed at the end of the block.

    Args:
        workers: processes; 1 stays in this one.
        threads: torch threads of each.
        batched: of one process: whether clients train together, where the method can; None: on a GPU.
    """
    from experiments.parallel.pool_runner import PoolRunner
    from fedcg.learning.simulation.simulation import simulate
    from fedcg.learning.simulation.tasks import SerialRunner

    runner: Runner = SerialRunner(batched=batched) if workers == 1 else PoolRunner(workers, threads)
    try:
        yield Lanes(partial(simulate, runner=runner))
    finally:
        runner.close()


@contextmanager
def open_ray_lanes(
    address: str, settings: list[RunSetting], cpus: int | None, announce: Callable[[str], None]
) -> Iterator[Lanes]:
    """Several runs at a time on a Ray cluster, which is left at the end of the block, and ended if it is this command's own.

    Args:
        address: as `experiments.parallel.ray_cluster.open_cluster` takes it.
        settings: of the runs to be done.
        cpus: of a cluster of this machine alone; all when None.
        announce: prints a line for the operator.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        OptionError: the cluster can't be used.
    """
    from experiments.parallel.ray_cluster import open_cluster

    with open_cluster(address, announce, cpus=cpus) as cluster:
        from experiments.parallel.ray_simulator import RaySimulator, lanes_for

        threads = max(setting.threads for setting in settings)
        stopping = Event()
        gpus = cluster.gpus() if settings[0].device != "cpu" else None
        slots = cluster.slots(threads)
        if slots == 0:
            raise OptionError(f"--threads {threads}: the Ray cluster has fewer CPUs")
        count = lanes_for(len(settings), min(setting.clients for setting in settings), slots, gpus)
        yield Lanes(RaySimulator(cluster, threads, stopping), count, stopping)
