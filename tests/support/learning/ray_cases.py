"""Pieces of a simulation that meet with an accident the first time: what the tests of Ray let workers do in place of the real ones."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.parallel.ray_runner import Demands, Reported, host
from fedcg.learning.method import Aggregate
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation
from fedcg.learning.simulation.tasks import LocalOutcome, LocalTask, local_task

UNTIL_KILLED_S = 120.0


def _first_time(folder: Path, what: str) -> bool:
    """Whether nobody has been here before; whoever asks first leaves its process id."""
    try:
        with (folder / what).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def killed_after_training(folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """A local round whose worker is killed, the first time that this client trains in this round, before it can answer."""
    outcome = local_task(party, task, aggregate)
    if task.client == "b" and _first_time(folder, f"killed-{task.number}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def noted(folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """A local round that leaves the name of the node that it ran on."""
    (folder / _node()).touch()
    return local_task(party, task, aggregate)


def hangs_on(node: str, folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """A local round that, the first time on a certain node, does not end by itself."""
    if _node() == node and _first_time(folder, "hanging"):
        time.sleep(UNTIL_KILLED_S)
    return local_task(party, task, aggregate)


def host_killed_after_a_round(
    folder: Path, demands: Demands, party: Party, schedule: Schedule, resume: Simulation | None
) -> Iterator[Reported]:
    """The process of a whole run, which is killed, the first time, when its second round is done."""
    for reported in host(demands, party, schedule, resume):
        if reported[1].rounds == 2 and _first_time(folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        yield reported
