"""A simulation trains what a demo of the same seed trains, and its record says what it takes to repeat it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData
from experiments.data.client_datasets import build_cohort
from experiments.data.partition_folders import prepare
from experiments.errors import OptionError, RunError
from experiments.settings import discriminator_for
from experiments.simulation.batch import PlannedRun, RunSetting, has_record
from experiments.simulation.party_builder import roots_of
from experiments.simulation.simulation_record import FIGURES
from experiments.simulation.single_run import FAILURES_FILE, FailedRun, Runs, write_failures
from fedcg.learning.networks.gan import GENERATORS
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.simulation.simulation import Simulation, simulate
from fedcg.learning.spec import plan_from_mapping

SMALL = RunSetting(
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


def ignore(_planned: PlannedRun, _now: Simulation) -> None:
    pass


def simulated(setting: RunSetting, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return Runs(folder, simulate, ignore).run(PlannedRun(setting=setting))


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("seconds", "date", "name")}


@pytest.mark.parametrize("method", ["fedcg", "local"])
def test_a_small_simulation_gives_a_complete_record_that_is_the_same_again(method: str, tmp_path: Path) -> None:
    params = SMALL.params if method == "fedcg" else {}
    setting = SMALL.model_copy(update={"method": method, "params": params})
    record, again = simulated(setting, tmp_path / "one"), simulated(setting, tmp_path / "two")
    assert without_timings(record) == without_timings(again)
    clients = record["clients"]
    assert [client["id"] for client in clients] == ["client-1", "client-2"]
    assert all(client["curve"]["round"] == [1, 2] and set(FIGURES) <= set(client) for client in clients)
    assert all(sum(client["label_counts"]) == client["train_images"] for client in clients)
    assert all(0 <= client["accuracy_common_local"] <= 1 for client in clients)
    assert record["global"]["round"] == [1, 2]
    assert record["mean"]["global_accuracy_best"] == max(record["global"]["accuracy"])
    assert (clients[0]["consistency"] is None) == (method == "local")
    assert (clients[0]["below_local"] is None) == (method == "local")
    assert (record["bytes"]["up"] == 0) == (method == "local")


def test_the_records_name_belongs_to_one_setting(tmp_path: Path) -> None:
    runs = Runs(tmp_path, simulate, ignore)
    planned = PlannedRun(setting=SMALL)
    assert not has_record(tmp_path, planned)
    runs.run(planned)
    assert has_record(tmp_path, planned)
    other = PlannedRun(setting=SMALL.model_copy(update={"rounds": 3}))
    with pytest.raises(OptionError, match="another setting"):
        has_record(tmp_path, other)
    runs.forget(other)
    assert not has_record(tmp_path, planned)


def test_a_run_in_which_nobody_can_train_is_an_error_and_leaves_no_record(tmp_path: Path) -> None:
    hopeless = SMALL.model_copy(update={"method": "fedavg", "params": {"optimiser": "sgd", "lr": 1e18}})
    with pytest.raises(RunError, match="no client could train in any round"):
        simulated(hopeless, tmp_path)
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.glob(".state/*/round-*"))
    write_failures(tmp_path, [FailedRun("digits-fedavg-seed0", "no client")])
    assert json.loads((tmp_path / FAILURES_FILE).read_text())["failures"][0]["run"] == "digits-fedavg-seed0"
    write_failures(tmp_path, [])
    assert not (tmp_path / FAILURES_FILE).exists()


def test_a_simulation_splits_a_clients_images_exactly_as_its_agent_does(tmp_path: Path) -> None:
    setting = SMALL.model_copy(update={"clients": 4, "images_per_client": 100})
    source = setting.source()
    prepared = prepare(source, tmp_path, setting.deal())
    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    mine = build_cohort(source, spec.image, setting.deal()).clients["client-1"]
    store = PrivateStore.open(tmp_path / "store", spec.federation, "client-1")
    agents = LocalData(prepared.clients[0].root, None, store).for_round(spec, 1)
    for ours, theirs in ((mine.train, agents.train), (mine.val, agents.val), (mine.test, agents.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert len(mine.train) + len(mine.val) == 100


def test_test_images_dealt_out_evenly_measure_clients_by_share_and_their_average_as_a_whole(tmp_path: Path) -> None:
    record = simulated(SMALL.model_copy(update={"method": "fedavg", "params": {}, "test": "even"}), tmp_path)
    assert record["mean"]["accuracy_common_personal"] is None
    tests = [client["test_images"] for client in record["clients"]]
    right = record["global"]["accuracy"][-1] * sum(tests)
    assert right == pytest.approx(round(right), abs=0.01)  # a share of all of them, and of nothing else
    assert max(tests) - min(tests) <= 1


def test_every_party_of_a_simulation_has_a_root_of_its_own() -> None:
    roots = roots_of(0, ("client-1", "client-2"))
    assert len({roots.cohort, roots.coordinator, *roots.devices.values()}) == 4
    assert roots_of(1, ("client-1",)).devices["client-1"] != roots.devices["client-1"]


def test_a_client_with_one_image_is_left_out_and_named_and_the_others_go_on(tmp_path: Path) -> None:
    for domain, count in (("large", 8), ("tiny", 1)):
        for part, images in (("train", count), ("test", 4)):
            for label in ("dark", "light"):
                folder = tmp_path / "data" / domain / part / label
                folder.mkdir(parents=True)
                for number in range(images if (domain, part, label) != ("tiny", "train", "light") else 0):
                    Image.new("L", (16, 16), 40 + number if label == "dark" else 200 + number).save(
                        folder / f"{number}.png"
                    )
    odd = {"data": str(tmp_path / "data"), "partition": "domains", "images_per_client": None, "validation": "test-half"}
    setting = SMALL.model_copy(update={**odd, "method": "fedsplit", "params": {}})
    record = simulated(setting, tmp_path / "out")
    failures = {client["id"]: [failure["reason"] for failure in client["failures"]] for client in record["clients"]}
    assert failures == {"client-1": [], "client-2": ["1 training images: at least 2 are needed"] * 2}
    assert record["clients"][0]["accuracy_after"] is not None


def test_a_compact_generator_brings_the_discriminator_of_its_kind() -> None:
    kinds = {"conv": "conv", "conv_small": "conv", "mlp": "mlp", "mlp3": "mlp", "mlp_small": "mlp", "gaussians": "mlp"}
    assert {name: discriminator_for(name) for name in kinds} == kinds
    assert set(kinds) == set(GENERATORS)
