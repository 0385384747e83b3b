"""`fedcg simulate --defence`: every method trains on the defended images, real ones measure it, and the record names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.simulation.batch import PlannedRun, RunSetting
from experiments.simulation.single_run import Runs
from fedcg.learning.image_set import ImageSet
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import simulate
from fedcg.learning.simulation.state import Simulation
from tests.support.commands import data_of, run_fedcg

SMALL = {
    "clients": 2,
    "partition": "iid",
    "images_per_client": 40,
    "rounds": 1,
    "local_epochs": 1,
    "image_size": 16,
    "shadow": False,
}
SHORT = {"gan_steps": 6, "obfuscation_steps": 4, "width": 4, "batch_size": 8}
OPTIONS = [
    *(
        word
        for name, value in SMALL.items()
        if name != "shadow"
        for word in (f"--{name.replace('_', '-')}", str(value))
    ),
    *("--no-shadow", "--no-plot", "--no-tensorboard", "--workers", "1"),
    *(word for name, value in SHORT.items() for word in ("--defence-set", f"{name}={value}")),
]


def test_any_method_runs_on_defended_digits_and_the_record_names_the_defence(tmp_path: Path) -> None:
    methods = ("--method", "fedavg", "--method", "fedcg", "--set", "fedcg.server_iterations=2")
    asked = ("--defence", "antigan", "--defence-set", "v_e=0.3")
    done = run_fedcg("simulate", *OPTIONS, *methods, *asked, "--json", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    records = data_of(done.stdout)["runs"]
    assert [record["method"] for record in records] == ["fedavg", "fedcg"]
    for record in records:
        assert record["defence"].startswith("antigan-v_e=0.3-gan_steps=6-obfuscation_steps=4")
        facts = record["defended"]["client-1"]
        assert 0 < float(facts.pop("spread")) < 1
        assert facts == {"features": "efficientnet_lite0", "classes_of_one_image": "0"}
        assert record["setting"]["defence_params"] == {**SHORT, "v_e": 0.3}
        assert f"{record['method']}-{record['defence']}-seed0" in done.stderr
    assert str(tmp_path) not in json.dumps(records)
    # Trained once for both methods: ten tenths for each of two clients.
    assert done.stderr.count("client-1: antigan 10/10") == done.stderr.count("client-2: antigan 10/10") == 1
    assert len(list((tmp_path / ".state" / "defence").rglob("antigan-*.safetensors"))) == 2
    samples = next((tmp_path / ".state" / "defence").rglob("client-1/samples.png"))
    assert np.array(Image.open(samples)).shape == (960, 288)
    again = run_fedcg("simulate", *OPTIONS, *methods, *asked, "--out", tmp_path)
    assert again.stderr.count("done before") == 2


class _Caught:
    """Takes the party that would be simulated."""

    def __init__(self) -> None:
        self.parties: list[Party] = []

    def __call__(self, party: Party, *args: Any, **others: Any) -> Simulation:
        self.parties.append(party)
        return simulate(party, *args, **others)


@pytest.mark.parametrize("defence", ["antigan", "ats"])
def test_every_training_image_changes_and_validation_and_test_stay_real(tmp_path: Path, defence: str) -> None:
    caught = _Caught()
    runs = Runs(tmp_path, caught, lambda *_: None)
    params = {"defence_params": SHORT} if defence == "antigan" else {}
    plain = RunSetting.model_validate({**SMALL, "method": "local"})
    settings = [plain, RunSetting.model_validate({**SMALL, "method": "local", "defence": defence, **params})]
    for setting in settings:
        runs.run(PlannedRun(setting=setting))
    real, defended = caught.parties
    for name, client in defended.datasets.items():
        truth = real.datasets[name]
        assert torch.equal(client.train.labels, truth.train.labels)
        assert bool((client.train.images != truth.train.images).flatten(1).any(dim=1).all())
        assert all(map(_same, (client.val, client.test), (truth.val, truth.test)))
    assert _same(defended.common or real.datasets["client-1"].val, real.common or real.datasets["client-1"].val)


def _same(one: ImageSet, other: ImageSet) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--defence antigam", "defence: there is no 'antigam' (did you mean `antigan`?)"),
        ("--defence antigan --defence-set ve=1", "ve: there is no such parameter (did you mean `v_e`?)"),
        ("--defence antigan --defence-set v_e", "--defence-set 'v_e': write key=value"),
        ("--defence-set v_e=1", "defence_params need a defence"),
        ("--defence antigan --mechanism dp_sgd.noise_multiplier=1", "dp_sgd's epsilon does not cover"),
    ],
)
def test_a_defence_that_can_not_be_had_is_named_before_anything_runs(tmp_path: Path, words: str, named: str) -> None:
    done = run_fedcg("simulate", *words.split(), "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert named in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_window_larger_than_the_images_fails_the_run_and_names_the_client(tmp_path: Path) -> None:
    done = run_fedcg("simulate", *OPTIONS, "--defence", "antigan", "--defence-set", "window=17", "--out", tmp_path)
    assert done.exit_code == 1
    assert "client-1: antigan: window 17 is larger than the images of 16x16" in " ".join(done.stderr.split())


def test_a_setting_without_a_defence_has_the_json_that_it_had() -> None:
    plain = RunSetting.model_validate(SMALL)
    assert {"defence", "defence_params"}.isdisjoint(plain.published())
    assert plain.is_same(RunSetting.model_validate({**SMALL, "defence": None}).published())
    assert not plain.is_same(RunSetting.model_validate({**SMALL, "defence": "ats"}).published())
