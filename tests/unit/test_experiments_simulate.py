"""A simulation trains what a demo of the same seed trains, and its record says what it takes to repeat it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from edge_client.local_data import LocalData
from edge_client.snapshot import Snapshot
from experiments.options import Setting
from experiments.partitions import Partition, prepare
from experiments.simulate import FIGURES, client_data, roots_of, run_simulation
from experiments.sources import write_digits
from fedcg.learning.initial import complete_spec
from fedcg.learning.spec import plan_from_mapping

SMALL = Setting(
    clients=2,
    partition="iid",
    images_per_client=60,
    rounds=2,
    local_epochs=1,
    image_size=16,
    params={"server_iterations": 3},
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def simulated(setting: Setting) -> dict[str, object]:
    return run_simulation(setting, threads=1, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("method", ["fedcg", "local"])
def test_a_small_simulation_gives_a_complete_record_that_is_the_same_again(method: str) -> None:
    params = SMALL.params if method == "fedcg" else {}
    setting = SMALL.model_copy(update={"method": method, "params": params})
    record, again = simulated(setting), simulated(setting)
    clients = record["clients"]
    assert isinstance(clients, list)
    assert [client["id"] for client in clients] == ["client-1", "client-2"]
    assert all(len(client["curve"]) == 2 and set(FIGURES) <= set(client) for client in clients)
    assert all(0 <= client["accuracy_common_local"] <= 1 for client in clients)

    def curves(run: dict[str, object]) -> str:
        stripped = json.loads(json.dumps(run["clients"]))
        for client in stripped:
            for point in client["curve"]:
                del point["seconds"]
        return json.dumps(stripped)

    assert curves(record) == curves(again)
    assert record["spec"] == again["spec"]
    assert (clients[0]["consistency"] is None) == (method == "local")


def test_a_simulation_splits_a_clients_folder_exactly_as_its_agent_does(tmp_path: Path) -> None:
    source = write_digits(tmp_path / "source")
    prepared = prepare(source, tmp_path, clients=4, partition=Partition.parse("iid"), seed=0, images_per_client=100)
    spec = complete_spec(plan_from_mapping(SMALL.plan(None)))
    mine = client_data(prepared.clients[0].root, spec)

    def keep(_spec: str, _round: int, make: object) -> Snapshot:
        assert callable(make)
        made = make()
        assert isinstance(made, Snapshot)
        return made

    agents = LocalData(prepared.clients[0].root, None).for_round(spec, 1, keep, lambda: None)
    for ours, theirs in ((mine.train, agents.train), (mine.val, agents.val), (mine.test, agents.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert len(mine.train) + len(mine.val) == 100


def test_every_party_of_a_simulation_has_a_root_of_its_own() -> None:
    roots = roots_of(0, ("client-1", "client-2"))
    assert len({roots.cohort, roots.coordinator, *roots.devices.values()}) == 4
    assert roots_of(1, ("client-1",)).devices["client-1"] != roots.devices["client-1"]
