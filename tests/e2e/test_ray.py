"""A Ray cluster gives what one process gives, bit for bit, whichever of its workers and nodes die."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from experiments.errors import RunError
from experiments.parallel import ray_runner
from experiments.parallel.ray_cluster import Announce, open_cluster, own_build, slots
from experiments.parallel.ray_runner import RayRunner
from fedcg.learning.simulation import simulation
from fedcg.learning.simulation.simulation import Schedule, simulate
from tests.support.commands import finished, start_fedcg
from tests.support.edge.filled_store import files_of
from tests.support.learning import ray_cases
from tests.support.learning.learning_cases import NAMES, assert_same_simulation, party_of
from tests.support.stack import wait_for

pytestmark = [
    pytest.mark.slow,
    # Ray's own: it lets go of its processes and of their logs without waiting or closing, and announces its next version.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*ray:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
]

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 64,
    "RAY_USAGE_STATS_ENABLED": "0",
    # On Linux too this variable decides whether Ray insists on an address that other machines reach; without, it listens on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray 3's behaviour; before, it hides accelerators from tasks that ask for none, and warns of that.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
TINY = shlex.split(
    "--clients 2 --partition iid --images-per-client 40 --local-epochs 1 --image-size 16 --set fedcg.server_iterations=3 "
    "--no-plot --no-tensorboard"
)


class TwoNodes:
    """A cluster of two nodes on this machine, the second of which can be lost and replaced."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        self._second: Any = self._cluster.add_node(**NODE)
        self.address = str(self._cluster.address)

    @property
    def second(self) -> str:
        return str(self._second.node_id)

    def lose_second(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)

    def replace_second(self) -> None:
        self._second = self._cluster.add_node(**NODE)
        self._cluster.wait_for_nodes()

    def stop(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        started = TwoNodes()
        try:
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="module")
def cluster(nodes: TwoNodes) -> Iterator[Announce]:
    with open_cluster(nodes.address, print) as opened:
        yield opened


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("method", ["fedcg", "fedmd_cg", "feddf"])
def test_two_nodes_share_a_simulation_and_give_that_of_one_process(
    cluster: Announce, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slots(1) == 2
    one = party_of(method)
    expected = simulate(one, Schedule(rounds=2))
    monkeypatch.setattr(simulation, "local_task", partial(ray_cases.noted, tmp_path))
    assert_same_simulation(simulate(one, Schedule(rounds=2), runner=RayRunner()), expected)
    assert len(list(tmp_path.iterdir())) == 2  # a name per node


PROGRAM = """
import sys
import fedcg
import torch
from tests.unit.experiments.test_face import QUICK, clients

settings = {**QUICK, "params": {"server_iterations": 5}}
here, there = (fedcg.simulate(clients(), "fedcg", 2, ray=ray, **settings) for ray in (None, sys.argv[1]))
assert here.record["clients"] == there.record["clients"]
for name, one in here.clients.items():
    pairs = zip(one.model.state_dict().values(), there.clients[name].model.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
"""


def test_a_program_of_ones_own_is_simulated_on_a_cluster(nodes: TwoNodes) -> None:
    command = [sys.executable, "-c", PROGRAM, nodes.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_a_killed_workers_task_is_redone(cluster: Announce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = party_of("fedavg")
    expected = simulate(one, Schedule(rounds=2))
    monkeypatch.setattr(simulation, "local_task", partial(ray_cases.killed_after_training, tmp_path))
    assert_same_simulation(simulate(one, Schedule(rounds=2), runner=RayRunner()), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"killed-1", "killed-2"}


def test_a_task_whose_node_is_lost_is_repeated_on_another(
    cluster: Announce, nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = party_of("fedavg")
    expected = simulate(one, Schedule(rounds=2))
    monkeypatch.setattr(simulation, "local_task", partial(ray_cases.hangs_on, nodes.second, tmp_path))

    def lose_it() -> None:
        wait_for((tmp_path / "hanging").exists, "a task on the second node")
        nodes.lose_second()

    accident = Thread(target=lose_it)
    accident.start()
    try:
        assert_same_simulation(simulate(one, Schedule(rounds=2), runner=RayRunner()), expected)
    finally:
        accident.join()
        nodes.replace_second()


def test_a_client_and_a_server_that_diverge_tell_the_reasons_they_tell_without_ray(cluster: Announce) -> None:
    one = party_of("fedavg", optimiser="sgd", lr=1e18)
    found, expected = simulate(one, Schedule(rounds=1), runner=RayRunner()), simulate(one, Schedule(rounds=1))
    assert found.failures == expected.failures
    assert len(found.failures) == len(NAMES)
    assert found.server_failures == expected.server_failures


def test_a_node_with_another_build_is_refused(cluster: Announce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "own_build", lambda: {**own_build(), "torch": "0.0.1"})
    with pytest.raises(RunError, match=r"can't be used: torch \S+ instead of 0\.0\.1"):
        simulate(party_of("fedavg"), Schedule(rounds=1), runner=RayRunner())


def free_cpus() -> int:
    import ray

    return int(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def records(folder: Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("digits-*.json")}
    return {
        name: {key: value for key, value in record.items() if key not in ("seconds", "date")}
        for name, record in found.items()
    }


def test_the_command_gives_the_same_records_with_ray(tmp_path: Path, nodes: TwoNodes) -> None:
    batch = ["--method", "fedcg", "--method", "local", "--seeds", "0,1", "--rounds", "2", "--keep-updates", "2"]
    finished(start_fedcg("simulate", *TINY, *batch, "--out", tmp_path / "ray", "--ray", nodes.address))
    finished(start_fedcg("simulate", *TINY, *batch, "--out", tmp_path / "plain", "--workers", "1"))
    assert len(records(tmp_path / "ray")) == 4
    assert records(tmp_path / "ray") == records(tmp_path / "plain")
    assert len(files_of(tmp_path / "ray" / "updates")) > 40
    assert files_of(tmp_path / "ray" / "updates") == files_of(tmp_path / "plain" / "updates")


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_frees_the_cluster_and_keeps_its_checkpoint(
    tmp_path: Path, cluster: Announce, nodes: TwoNodes, by: signal.Signals
) -> None:
    folder = tmp_path / "stopped"
    batch = ["--method", "fedcg", "--rounds", "40", "--out", str(folder)]

    def rounds() -> int:
        return len(list(folder.glob(".state/*/round-*.pt")))

    stopped = start_fedcg("simulate", *TINY, *batch, "--ray", nodes.address)
    wait_for(lambda: rounds() > 0 or stopped.poll() is not None, "a round")
    stopped.send_signal(by)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == (130 if by is signal.SIGINT else -by), errors
    wait_for(lambda: free_cpus() == 2, "the end of its tasks", deadline_s=180)
    assert not records(folder)
    assert rounds() >= 1
