"""Which runs a call means, what a published setting becomes with options over it, and what a folder of runs is summed up to."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import Result

from experiments.errors import OptionError
from experiments.settings import parse_method_params, parse_networks, parse_seeds
from experiments.simulation import curves as event_files
from experiments.simulation.batch import RunSetting, load_batch, plan_batch, planned_run, save_batch
from experiments.simulation.curves import mean_curve
from fedcg.learning.privacy import PrivacySettings
from tests.support.commands import data_of, run_fedcg


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_method_runs_with_every_seed_and_its_own_parameters() -> None:
    params = {"": {"lr": 0.1}, "fedprox": {"mu": 0.5}}
    batch = plan_batch({"rounds": 3}, ["fedavg", "fedprox", "fedavg"], [0, 1], params)
    runs = [(run.setting.method, run.setting.seed, run.setting.params) for run in batch.runs]
    assert runs == [
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


def test_a_network_is_every_methods_or_that_of_one_that_is_run() -> None:
    typed = {"network": ["lenet5", "fedcg=own.splits:one"], "generator": ["fedcg=conv"]}
    networks = parse_networks(typed, ["fedcg", "local"])
    assert networks == {"": {"network": "lenet5"}, "fedcg": {"network": "own.splits:one", "generator": "conv"}}
    runs = plan_batch({}, ["fedcg", "local"], [0], {}, networks).runs
    assert [(run.setting.network, run.setting.generator) for run in runs] == [
        ("own.splits:one", "conv"),
        ("lenet5", "mlp"),
    ]


@pytest.mark.parametrize(("text", "seeds"), [("0", (0,)), ("3,1", (3, 1)), ("0-2,7", (0, 1, 2, 7))])
def test_seeds_are_a_list_with_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1,,2", "5-1", "-1", "0-99999999999"])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="seeds"):
        parse_seeds(text)


def test_options_beat_what_is_published_and_the_difference_is_written_down() -> None:
    published = {"rounds": 100, "local_epochs": 20, "method": "fedprox", "params": {"lr": 3e-4, "mu": 0.1}}
    plain = planned_run(published, {"device": "cpu", "seed": 4})
    assert plain.reduced == {}
    run = planned_run(published, {"rounds": 12, "lr": 0.01, "params": {"mu": 0.5}})
    assert run.reduced == {"rounds": (100, 12), "params.lr": (3e-4, 0.01), "params.mu": (0.1, 0.5)}
    assert run.setting.all_params() == {"epochs": 20, "lr": 0.01, "mu": 0.5}
    assert planned_run(published, {"crop": 4}).reduced == {"crop": (0, 4)}
    with pytest.raises(ValidationError, match="rounds"):
        planned_run(published, {"rounds": 0})


def test_a_batch_is_remembered_by_its_folder(tmp_path: Path) -> None:
    batch = plan_batch({}, ["fedavg"], [0], {})
    save_batch(batch, tmp_path)
    assert load_batch(tmp_path) == batch
    with pytest.raises(OptionError, match="no simulation that could be resumed"):
        load_batch(tmp_path / "elsewhere")


def test_a_folder_remembers_every_call_and_takes_no_other_data_for_the_same(tmp_path: Path) -> None:
    first = plan_batch({"data": "/here/shop"}, ["fedavg"], [0], {})
    save_batch(first, tmp_path)
    save_batch(plan_batch({"data": "/here/shop", "rounds": 9}, ["local"], [0], {}), tmp_path)
    assert [run.setting.method for run in load_batch(tmp_path).runs] == ["fedavg", "local"]
    elsewhere = plan_batch({"data": "/there/shop"}, ["fedavg"], [0], {})
    with pytest.raises(OptionError, match=r"was run with /here/shop there, not /there/shop"):
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


def test_a_line_of_the_picture_is_the_mean_over_clients_and_runs() -> None:
    def client(*accuracies: float | None) -> dict[str, Any]:
        return {"curve": {"round": [1, 2][: len(accuracies)], "accuracy": list(accuracies)}}

    records = [{"clients": [client(0.5, 0.6), client(0.7, None)]}, {"clients": [client(0.6)]}]
    # round 1: 50, 70 and 60 have the mean 60 and the variance (100 + 100 + 0) / 3; round 2: one value
    rounds, means, spreads = mean_curve(records, "accuracy")
    assert rounds == [1, 2]
    assert means == pytest.approx([60.0, 60.0])
    assert spreads == pytest.approx([(200 / 3) ** 0.5, 0.0])


def test_a_setting_recorded_before_an_option_existed_is_the_same_with_its_default() -> None:
    setting = RunSetting(data="/home/somebody/photos", rounds=3)
    recorded = setting.published()
    del recorded["participation"]
    assert setting.is_same(recorded)
    assert not setting.is_same({**recorded, "rounds": 4})
    assert not setting.is_same({**recorded, "unheard_of": 1})
    assert not setting.is_same(None)


@pytest.mark.parametrize(
    ("field", "value"), [("start", "random"), ("defence", "ats"), ("privacy", PrivacySettings(prune=0.5))]
)
def test_an_option_at_its_default_is_in_no_record_and_another_value_is_another_setting(
    field: str, value: object
) -> None:
    plain, other = RunSetting(), RunSetting.model_validate({field: value})
    assert field not in plain.published()
    assert RunSetting.model_validate(other.published()) == other
    assert other.is_same(other.published())
    assert not other.is_same(plain.published())
    assert not plain.is_same(other.published())


TINY = "--clients 2 --partition iid --images-per-client 40 --rounds 1 --local-epochs 1 --image-size 16 --workers 1"


def call(folder: Path, text: str) -> Result:
    return run_fedcg("simulate", *TINY.split(), "--out", folder, *text.split())


def test_without_tensorboard_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "find_spec", lambda name: None)
    refused = call(tmp_path / "runs", "--method local")
    assert refused.exit_code == 2
    assert "or --no-tensorboard" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_a_batch_fills_its_folder_and_does_nothing_twice(tmp_path: Path) -> None:
    first = call(tmp_path / "runs", "--method local --method fedavg --seeds 0,1 --json --no-shadow")
    assert first.exit_code == 0, first.output
    shown = data_of(first.stdout)
    assert [(run["method"], run["seed"]) for run in shown["runs"]] == [
        ("local", 0), ("fedavg", 0), ("local", 1), ("fedavg", 1)
    ]  # fmt: skip
    folder = tmp_path / "runs"
    with (folder / "runs.csv").open() as file:
        assert [line["name"] for line in csv.DictReader(file)] == [
            f"digits-{method}-seed{seed}" for method in ("fedavg", "local") for seed in (0, 1)
        ]
    with (folder / "curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "tensorboard").glob("*/events.out.tfevents.*"))) == 4
    again = call(folder, "--method local --method fedavg --seeds 0,1 --json --no-shadow")
    assert data_of(again.stdout) == {"runs": [], "failures": []}
    forced = call(folder, "--method local --force --json --no-shadow --no-plot --no-tensorboard")
    assert len(data_of(forced.stdout)["runs"]) == 1
    other = call(folder, "--method local --no-shadow --evaluate-every 2")
    assert other.exit_code == 2
    assert "another setting" in other.stderr


def test_each_method_of_a_call_may_have_networks_of_its_own(tmp_path: Path) -> None:
    runs, methods = tmp_path / "runs", ("fedcg", "ppidsg")
    text = "--method fedcg --method ppidsg --set fedcg.server_iterations=2 --no-shadow --no-plot --no-tensorboard"
    asked = f"{text} --network ppidsg=image_small --generator fedcg=mlp_small"
    done = call(runs, asked)
    assert done.exit_code == 0, done.stderr
    before = [json.loads((runs / f"digits-{method}-seed0.json").read_text()) for method in methods]
    assert [run["network"]["split"] for run in before] == ["lenet5_relu", "image_small"]
    assert [run["network"]["generator"] for run in before] == ["mlp_small", "mlp"]
    assert before[1]["setting"]["network"] == "image_small"
    (runs / "digits-ppidsg-seed0.json").unlink()
    resumed = run_fedcg("simulate", "--resume", runs, "--workers", "1", "--no-plot", "--no-tensorboard")
    assert resumed.exit_code == 0, resumed.stderr
    assert json.loads((runs / "digits-ppidsg-seed0.json").read_text())["mean"] == before[1]["mean"]
    other = call(runs, asked.replace("mlp_small", "mlp3"))
    assert other.exit_code == 2
    assert "digits-fedcg-seed0.json is the record of another setting" in other.stderr
    (runs / "digits-fedcg-seed0.json").unlink()  # what was refused has left nothing behind that --resume would run
    assert run_fedcg("simulate", "--resume", runs, "--workers", "1", "--no-plot", "--no-tensorboard").exit_code == 0
    assert json.loads((runs / "digits-fedcg-seed0.json").read_text())["network"]["generator"] == "mlp_small"


def test_crops_reach_the_training_and_the_record(tmp_path: Path) -> None:
    text = "--method local --no-shadow --no-plot --no-tensorboard --json"
    plain, cropped = (
        data_of(call(tmp_path / f"crop-{pixels}", f"{text} --crop {pixels}").stdout)["runs"][0] for pixels in (0, 2)
    )
    assert (plain["setting"]["crop"], cropped["setting"]["crop"]) == (0, 2)
    losses = [[client["curve"]["loss"] for client in run["clients"]] for run in (plain, cropped)]
    assert losses[0] != losses[1]


def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    text = "--method fedavg --method local --set fedavg.lr=1e18 --set fedavg.optimiser=sgd --json --no-plot --no-tensorboard"
    done = call(tmp_path / "runs", text)
    assert done.exit_code == 1
    shown = data_of(done.stdout)
    assert [run["method"] for run in shown["runs"]] == ["local"]
    assert [failure["run"] for failure in shown["failures"]] == ["digits-fedavg-seed0"]
    assert "RunError" in (tmp_path / "runs" / ".state" / "digits-fedavg-seed0.traceback.txt").read_text()
    assert json.loads((tmp_path / "runs" / "failures.json").read_text())["failures"] == shown["failures"]


def test_a_run_whose_server_never_merged_says_so_beside_its_figures(tmp_path: Path) -> None:
    text = "--method fedcg --set server_lr=1e12 --set server_iterations=3 --no-plot --no-tensorboard --no-shadow"
    done = call(tmp_path / "runs", text)
    assert done.exit_code == 0, done.output
    assert "rounds without a merge: 1 (distillation: " in done.stderr
    assert "undone" not in done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--method nosuch", "no method 'nosuch'"),
        ("--method local --set mu=1", "local has no parameter mu; `fedcg method show local`"),
        ("--device nosuch", "--device nosuch"),
        ("--method local --set lr=fast", "local: lr"),
        ("--validation never", "validation"),
        ("--participation 0", "participation"),
        ("--crop 16", "crop: crops of 16 pixels can miss the whole image; the shorter side has 16"),
        ("--generator nope", "no generator 'nope'; there are conv"),
        (
            "--method local --generator fedcg=mlp",
            "--generator fedcg=mlp: 'fedcg' is not one of the methods of this call (local)",
        ),
        ("--network lenet5 --network cnn_bn", "--network cnn_bn: given twice for every method"),
        ("--network fedcg=", "--network 'fedcg=': write NAME, or METHOD=NAME for one method"),
        ("--method local --method fedcg --discriminator fedcg=nope", "no discriminator 'nope'"),
        (
            "--method ppidsg --method local --network local=image_small",
            "network.split must be image_small or image_paper",
        ),
        (
            "--method fedprobe --clients 65",
            "fedprobe: most_clients = 64, and a round has 65 clients: raise it (--set most_clients=65",
        ),
        ("--image-size 12", "lenet5_relu needs images of at least 16x16, not 12x12"),
        ("--codec i4", "--codec"),
        ("--precision bf16", "needs --device cuda"),
        ("--seed 1 --seeds 0-2", "--seed is one run's root and --seeds those of several"),
        ("--clients 900", "training images can't be split over 900 clients with at least 40 each"),
    ],
)
def test_bad_options_end_the_call_before_anything_is_written(text: str, why: str, tmp_path: Path) -> None:
    done = call(tmp_path / "runs", text)
    assert done.exit_code == 2
    assert why in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_nothing_can_be_written_into_ends_the_call_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a letter")
    done = call(tmp_path / "taken", "--method local")
    assert done.exit_code == 2
    assert "nothing can be written there (Not a directory); choose another folder" in done.stderr
