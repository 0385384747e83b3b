"""Which runs a call means, what a published setting becomes with options over it, and what a folder of runs is summed up to."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from experiments.errors import OptionError
from experiments.settings import parse_method_params, parse_seeds
from experiments.simulation.batch import RunSetting, load_batch, plan_batch, planned_run, save_batch
from fedcg.learning.privacy import PrivacySettings


def test_every_method_runs_with_every_seed_and_its_own_parameters() -> None:
    params = {"": {"lr": 0.1}, "fedprox": {"mu": 0.5}}
    batch = plan_batch({"rounds": 3}, ["fedavg", "fedprox", "fedavg"], [0, 1], params)
    assert [(run.setting.method, run.setting.seed, run.setting.params) for run in batch.runs] == [
        ("fedavg", 0, {"lr": 0.1}),
        ("fedprox", 0, {"lr": 0.1, "mu": 0.5}),
        ("fedavg", 1, {"lr": 0.1}),
        ("fedprox", 1, {"lr": 0.1, "mu": 0.5}),
    ]
    assert all(run.setting.rounds == 3 for run in batch.runs)


def test_a_parameter_is_every_methods_or_that_of_one_that_is_run() -> None:
    assert parse_method_params(["lr=0.1", "fedprox.mu=1"], ("fedprox",)) == {"": {"lr": 0.1}, "fedprox": {"mu": 1}}
    with pytest.raises(OptionError, match="not one of the methods"):
        parse_method_params(["fedprox.mu=1"], ("fedavg",))


@pytest.mark.parametrize(("text", "seeds"), [("0", (0,)), ("3,1", (3, 1)), ("0-2,7", (0, 1, 2, 7))])
def test_seeds_are_a_list_with_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1,,2", "5-1", "-1", "0-99999999999"])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="seeds"):
        parse_seeds(text)


def test_options_beat_what_is_published_and_the_difference_is_written_down() -> None:
    published = {"rounds": 100, "local_epochs": 20, "method": "fedprox", "params": {"lr": 3e-4, "mu": 0.1}}
    assert planned_run(published, {"device": "cpu", "seed": 4}).reduced == {}
    run = planned_run(published, {"rounds": 12, "lr": 0.01, "params": {"mu": 0.5}})
    assert run.reduced == {"rounds": (100, 12), "params.lr": (3e-4, 0.01), "params.mu": (0.1, 0.5)}
    assert run.setting.all_params() == {"epochs": 20, "lr": 0.01, "mu": 0.5}
    assert planned_run(published, {"crop": 4}).reduced == {"crop": (0, 4)}
    with pytest.raises(ValidationError, match="rounds"):
        planned_run(published, {"rounds": 0})


def test_a_folder_remembers_every_call_and_takes_no_other_data_for_the_same(tmp_path: Path) -> None:
    first = plan_batch({"data": "/here/shop"}, ["fedavg"], [0], {})
    with pytest.raises(OptionError, match="no simulation that could be resumed"):
        load_batch(tmp_path)
    save_batch(first, tmp_path)
    assert load_batch(tmp_path) == first
    save_batch(plan_batch({"data": "/here/shop", "rounds": 9}, ["local"], [0], {}), tmp_path)
    assert [run.setting.method for run in load_batch(tmp_path).runs] == ["fedavg", "local"]
    elsewhere = plan_batch({"data": "/there/shop"}, ["fedavg"], [0], {})
    with pytest.raises(OptionError, match=r"was run on /here/shop there, not on /there/shop"):
        save_batch(elsewhere, tmp_path)
    assert load_batch(tmp_path).runs[0] == first.runs[0]
    save_batch(elsewhere, tmp_path, force=True)
    assert load_batch(tmp_path).runs[0] == elsewhere.runs[0]


def test_a_name_of_a_run_is_a_file_name() -> None:
    assert RunSetting(paper="fedcg:table1:cifar10-4", method="fedavg").name == "fedcg-table1-cifar10-4-fedavg-seed0"
    assert RunSetting(codec="i8-delta", aggregate_codec="f16").name == "digits-fedcg-i8-delta-f16-seed0"
    assert RunSetting(start="random").name == "digits-fedcg-random-start-seed0"
    named = RunSetting(data="/home/somebody/photos", variant="short", seed=3)
    assert named.name == "photos-fedcg-short-seed3"
    assert "somebody" not in json.dumps(named.published())
    assert RunSetting(data="torchvision:CIFAR10:/home/somebody").data_name == "torchvision:CIFAR10"
    with pytest.raises(ValidationError, match="variant"):
        RunSetting(variant="../elsewhere")


def test_a_setting_recorded_before_an_option_existed_is_the_same_with_its_default() -> None:
    setting = RunSetting(data="/home/somebody/photos", rounds=3)
    recorded = setting.published()
    del recorded["participation"]
    assert setting.is_same(recorded)
    assert setting.is_same({**recorded, "precision": "f32"})
    assert not setting.is_same({**recorded, "precision": "bf16"})
    assert not setting.is_same({**recorded, "rounds": 4})
    assert not setting.is_same({**recorded, "unheard_of": 1})
    assert not setting.is_same(None)


@pytest.mark.parametrize(
    ("field", "value"), [("start", "random"), ("defence", "ats"), ("privacy", PrivacySettings(prune=0.5))]
)
def test_a_default_option_is_in_no_record_and_another_value_is_another_setting(field: str, value: object) -> None:
    plain, other = RunSetting(), RunSetting.model_validate({field: value})
    assert field not in plain.published()
    assert RunSetting.model_validate(other.published()) == other
    assert other.is_same(other.published())
    assert not other.is_same(plain.published())
    assert not plain.is_same(other.published())
