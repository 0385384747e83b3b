"""Pieces of a simulation that fail the first time, which tests of Ray run instead of the real ones."""

import os
import signal
import time
from pathlib import Path

from fedcg.learning.method import Aggregate
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.tasks import LocalOutcome, LocalTask, local_task

UNTIL_KILLED_S = 120.0


def _first_time(folder: Path, what: str) -> bool:
    """Return True for the first caller, which stores its process id."""
    try:
        with (folder / what).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def killed_after_training(folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """Run a local round; its worker is killed before the answer when this client first trains in this round."""
    outcome = local_task(party, task, aggregate)
    if task.client == "b" and _first_time(folder, f"killed-{task.number}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def noted(folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """Run a local round that records the name of its node."""
    (folder / _node()).touch()
    return local_task(party, task, aggregate)


def hangs_on(node: str, folder: Path, party: Party, task: LocalTask, aggregate: Aggregate) -> LocalOutcome:
    """Run a local round that, the first time on a certain node, does not end."""
    if _node() == node and _first_time(folder, "hanging"):
        time.sleep(UNTIL_KILLED_S)
    return local_task(party, task, aggregate)
