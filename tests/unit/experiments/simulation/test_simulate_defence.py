"""`fedcg simulate --defence`: every method trains on the defended images, real ones measure it, and the record names it."""

import json
import re
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
from fedcg.learning.simulation.simulation import Simulation, simulate
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
PLAIN = [
    *(
        word
        for name, value in SMALL.items()
        if name != "shadow"
        for word in (f"--{name.replace('_', '-')}", str(value))
    ),
    *("--no-shadow", "--no-plot", "--no-tensorboard", "--workers", "1"),
]
OPTIONS = [
    *PLAIN,
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
        ("--defence antigan --defence-set v_e", "--defence-set 'v_e': write key=value"),
        ("--defence-set v_e=1", "defence_params need a defence"),
        ("--defence antigan --mechanism dp_sgd.noise_multiplier=1", "dp_sgd's epsilon does not cover"),
        ("--defence antigan --defence-set window=33", "antigan: window = 33 is larger than the images of 32x32 pixels"),
        ("--defence etc --defence-set key=cohort --start public", "etc: key = cohort needs the cohort secret"),
    ],
)
def test_a_defence_that_can_not_be_had_is_named_before_anything_runs(tmp_path: Path, words: str, named: str) -> None:
    done = run_fedcg("simulate", *words.split(), "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert named in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_audit_of_a_defended_client_is_against_its_real_images(tmp_path: Path) -> None:
    done = run_fedcg("simulate", *PLAIN, "--defence", "ats", "--keep-updates", "all", "--out", tmp_path)
    assert done.exit_code == 0
    (recording,) = (tmp_path / "updates").iterdir()
    plain = run_fedcg("simulate", *PLAIN, "--keep-updates", "all", "--out", tmp_path / "plain")
    assert plain.exit_code == 0
    (undefended,) = (tmp_path / "plain" / "updates").iterdir()
    real, trained_on, as_it_was = (
        np.load(file)
        for file in (
            recording / "truth" / "real" / "client-1.npz",
            recording / "truth" / "client-1.npz",
            undefended / "truth" / "client-1.npz",
        )
    )
    assert np.array_equal(real["x_train"], as_it_was["x_train"])
    assert not np.array_equal(real["x_train"], trained_on["x_train"])
    assert np.array_equal(real["y_train"], trained_on["y_train"])
    assert f"--data {recording / 'truth' / 'real' / 'client-1.npz'}" in " ".join(done.output.split())
    assert not (undefended / "truth" / "real").exists()


def test_classes_of_one_image_are_a_warning_before_antigan_trains(tmp_path: Path) -> None:
    few = [word if word != "40" else "12" for word in OPTIONS]  # ten classes
    done = run_fedcg("simulate", *few, "--defence", "antigan", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    printed = " ".join(done.stderr.split())
    warning = re.search(
        r"client-1: antigan: \d of 10 classes here have a single training image: of such a class", printed
    )
    assert warning is not None
    assert warning.start() < printed.index("client-1: antigan 1/10")


LEARNING = {**SMALL, "images_per_client": 300, "local_epochs": 12, "lr": 0.003, "shadow": True}


@pytest.mark.slow
def test_every_image_that_a_model_gets_is_encrypted_with_its_clients_key(tmp_path: Path) -> None:
    caught = _Caught()
    runs = Runs(tmp_path, caught, lambda *_: None)
    setting = RunSetting.model_validate({**LEARNING, "method": "fedsplit", "defence": "etc"})
    plain = RunSetting.model_validate({**SMALL, "images_per_client": 300, "method": "local"})
    record, _ = (runs.run(PlannedRun(setting=one)) for one in (setting, plain))
    encrypted, real = caught.parties
    for name, client in encrypted.datasets.items():
        assert client.input_layer is not None
        for own, truth in (
            (getattr(client, part), getattr(real.datasets[name], part)) for part in ("train", "val", "test")
        ):
            assert torch.equal(own.images, client.input_layer.encrypt(truth.images))
            assert not torch.equal(own.images, truth.images)
            assert torch.equal(own.labels, truth.labels)
        (figures,) = (one for one in record["clients"] if one["id"] == name)
        for kind in ("personal", "common_personal", "local", "common_local"):
            assert figures[f"accuracy_{kind}"] > 0.5, kind
    assert encrypted.common is not None
    assert _same(encrypted.common, real.common or encrypted.common)
    one, two = (client.input_layer for client in encrypted.datasets.values())
    assert one is not None
    assert two is not None
    assert not torch.equal(one.source, two.source)
    assert (record["defence"], record["defended"]["client-1"]) == (
        "etc",
        {"steps": "IR,IA,IF,IS", "block": "4", "key": "device"},
    )


def test_etc_is_chosen_on_the_command_line_and_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    words = [word for word in OPTIONS if not any(word.startswith(f"{name}=") for name in SHORT)]
    words = [word for word in words if word != "--defence-set"]
    asked = ["--method", "fedavg", "--defence", "etc", "--out", tmp_path]
    for chosen in (["key=cohort", "block=2"], ["scrambling=IS,IA"]):
        own = [word for pair in chosen for word in ("--defence-set", pair)]
        done = run_fedcg("simulate", *words, *asked, *own, "--json")
        assert done.exit_code == 0, done.output
        (record,) = data_of(done.stdout)["runs"]
        facts = record["defended"]["client-1"]
        assert {pair.partition("=")[0] for pair in chosen} <= set(record["setting"]["defence_params"])
        assert facts["steps"] == ("IS,IA" if "scrambling=IS,IA" in chosen else "IR,IA,IF,IS")
        assert run_fedcg("simulate", *words, *asked, *own).stderr.count("done before") == 1
    keys = [layer_sources(tmp_path / "keys" / key, key) for key in ("cohort", "device")]
    assert torch.equal(*keys[0])
    assert not torch.equal(*keys[1])


def layer_sources(folder: Path, key: str) -> list[torch.Tensor]:
    caught = _Caught()
    asked = {**SMALL, "method": "local", "defence": "etc", "defence_params": {"key": key}}
    Runs(folder, caught, lambda *_: None).run(PlannedRun(setting=RunSetting.model_validate(asked)))
    return [client.input_layer.source for client in caught.parties[0].datasets.values() if client.input_layer]
