"""`fedcg simulate --defence`: every method trains on the defended images, real ones measure it, and the record names it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.simulation.batch import RunSetting
from fedcg.learning.image_set import ImageSet
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Simulation, simulate
from tests.support.present import present
from tests.support.simulations import SMALL, fedcg_simulate, records_of, run_of

SHORT = {"gan_steps": 6, "obfuscation_steps": 4, "width": 4, "batch_size": 8}
SHORTLY = " ".join(f"--defence-set {name}={value}" for name, value in SHORT.items())
ALONE = SMALL.model_copy(update={"images_per_client": 40, "rounds": 1, "method": "local", "params": {}})


def test_any_method_runs_on_defended_digits_and_the_record_names_the_defence(tmp_path: Path) -> None:
    methods = "--method fedavg --method fedcg --set fedcg.server_iterations=2"
    asked = f"{methods} --defence antigan {SHORTLY} --defence-set v_e=0.3"
    done = fedcg_simulate(tmp_path, asked, "--json")
    records = records_of(done)
    assert [record["method"] for record in records] == ["fedavg", "fedcg"]
    for record in records:
        assert record["defence"].startswith("antigan-v_e=0.3-gan_steps=6-obfuscation_steps=4")
        facts = record["defended"]["client-1"]
        assert all(0 < float(facts.pop(name)) < 1 for name in ("spread", "real_spread"))
        assert facts == {"features": "efficientnet_lite0", "classes_of_one_image": "0"}
        assert record["setting"]["defence_params"] == {**SHORT, "v_e": 0.3}
        assert f"{record['method']}-{record['defence']}-seed0" in done.stderr
    assert str(tmp_path) not in json.dumps(records)
    # Trained once for both methods: ten tenths for each of two clients.
    assert done.stderr.count("client-1: antigan 10/10") == done.stderr.count("client-2: antigan 10/10") == 1
    assert len(list((tmp_path / ".state" / "defence").rglob("antigan-*.safetensors"))) == 2
    samples = next((tmp_path / ".state" / "defence").rglob("client-1/samples.png"))
    assert np.array(Image.open(samples)).shape == (960, 288)
    assert fedcg_simulate(tmp_path, asked).stderr.count("already done") == 2


def parties_of(folder: Path, *settings: RunSetting) -> list[Party]:
    """The parties that were simulated, run by run in one folder."""
    parties: list[Party] = []

    def caught(party: Party, *args: Any, **others: Any) -> Simulation:
        parties.append(party)
        return simulate(party, *args, **others)

    for setting in settings:
        run_of(setting, folder, caught)
    return parties


def defended_by(defence: str, params: Mapping[str, object], setting: RunSetting = ALONE) -> RunSetting:
    return RunSetting.model_validate({**setting.model_dump(), "defence": defence, "defence_params": params})


@pytest.mark.parametrize("defence", ["antigan", "ats"])
def test_every_training_image_changes_and_validation_and_test_stay_real(tmp_path: Path, defence: str) -> None:
    params = SHORT if defence == "antigan" else {}
    real, defended = parties_of(tmp_path, ALONE, defended_by(defence, params))
    for name, client in defended.datasets.items():
        truth = real.datasets[name]
        assert torch.equal(client.train.labels, truth.train.labels)
        assert bool((client.train.images != truth.train.images).flatten(1).any(dim=1).all())
        assert all(map(_same, (client.val, client.test), (truth.val, truth.test)))
    assert _same(present(defended.common), present(real.common))


def _same(one: ImageSet, other: ImageSet) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


def test_with_one_defender_the_other_clients_have_neither_defence_nor_mechanisms(tmp_path: Path) -> None:
    one = {"defenders": 1, "defence": "ats", "method": "fedavg", "privacy": {"gradient_noise": 0.1}}
    setting = RunSetting.model_validate({**ALONE.model_dump(), **one})
    real, party = parties_of(tmp_path, ALONE, setting)
    changed = [not _same(party.datasets[name].train, client.train) for name, client in real.datasets.items()]
    noised = [party.client_context(name, 1).privacy.is_on for name in real.datasets]
    assert changed == noised == [True, False]
    assert list(json.loads((tmp_path / f"{setting.name}.json").read_text())["defended"]) == ["client-1"]


def test_the_audit_of_a_defended_client_is_against_its_real_images(tmp_path: Path) -> None:
    done, plain = (
        fedcg_simulate(tmp_path / str(at), f"--method fedsplit {defence} --keep-updates all")
        for at, defence in enumerate(("--defence ats", ""))
    )
    assert (done.exit_code, plain.exit_code) == (0, 0)
    (recording,), (undefended,) = ((tmp_path / str(at) / "updates").iterdir() for at in (0, 1))
    real, trained_on, as_it_was = (
        np.load(truth / "client-1.npz")
        for truth in (recording / "truth" / "real", recording / "truth", undefended / "truth")
    )
    assert np.array_equal(real["x_train"], as_it_was["x_train"])
    assert not np.array_equal(real["x_train"], trained_on["x_train"])
    assert np.array_equal(real["y_train"], trained_on["y_train"])
    assert f"--data {recording / 'truth' / 'real' / 'client-1.npz'}" in " ".join(done.output.split())
    assert not (undefended / "truth" / "real").exists()


@pytest.mark.slow
def test_every_image_that_a_model_gets_is_encrypted_with_its_clients_key(tmp_path: Path) -> None:
    more = {"images_per_client": 300, "local_epochs": 12, "lr": 0.003, "shadow": True, "method": "fedsplit"}
    setting = defended_by("etc", {}, ALONE.model_copy(update=more))
    encrypted, real = parties_of(tmp_path, setting, ALONE.model_copy(update={"images_per_client": 300}))
    record = json.loads((tmp_path / f"{setting.name}.json").read_text())
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
    assert _same(present(encrypted.common), present(real.common))
    one, two = (client.input_layer for client in encrypted.datasets.values())
    assert not torch.equal(present(one).source, present(two).source)
    assert record["defence"] == "etc"
    assert record["defended"]["client-1"] == {"steps": "IR,IA,IF,IS", "block": "4", "key": "device"}


def test_the_key_of_etc_is_the_cohorts_or_each_devices_own(tmp_path: Path) -> None:
    keys = []
    for key in ("cohort", "device"):
        (party,) = parties_of(tmp_path / key, defended_by("etc", {"key": key}))
        layers = [client.input_layer for client in party.datasets.values()]
        keys.append([layer.source for layer in layers if layer is not None])
    assert torch.equal(*keys[0])
    assert not torch.equal(*keys[1])
