"""`fedcg simulate`, as a user types it: what it prints, writes and does not do twice, on odd images too."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from PIL import Image

from experiments.simulation.batch import load_batch
from fedcg.errors import NOT_FOUND
from fedcg.learning.split_names import ALLOW_VARIABLE
from tests.support.commands import data_of, run_fedcg
from tests.support.installed import importable
from tests.support.simulations import QUIET, fedcg_simulate, records_of

BOTH = "--method local --method fedavg --seeds 0,1 --json --plot --tensorboard"


def resume(folder: Path, *words: object) -> Any:
    return run_fedcg("simulate", "--resume", folder, *QUIET.split(), *words)


# Batches


SIGNAL_SPLIT = """
from torch import nn
from fedcg.learning.networks import FeatureRange, Split

def split():
    def classifier(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], classes))
    return Split(lambda n: nn.Sequential(nn.Conv1d(n, 4, 5, 5), nn.ReLU()), classifier, FeatureRange.NON_NEGATIVE)
"""


def test_tensors_are_trained_on_and_recorded_by_an_own_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signal_split.py").write_text(SIGNAL_SPLIT)
    monkeypatch.setenv(ALLOW_VARIABLE, "")  # which the command extends
    [folder] = importable(tmp_path, monkeypatch)
    data, labels = folder / "signals.npz", np.arange(300) % 2
    signals = np.random.default_rng(0).normal(labels[:, None, None], size=(300, 6, 50)).astype(np.float32)
    np.savez(data, inputs=signals, labels=labels)
    asked = (
        f"--method local --method fedavg --data {data} --rounds 2 --local-epochs 9 --lr 0.02 --keep-updates 2 --json"
    )
    ours = ("--network", "signal_split:split")
    runs = records_of(fedcg_simulate(folder / "runs", asked, *ours))
    assert [run["method"] for run in runs] == ["local", "fedavg"]
    assert min(run["mean"]["accuracy_personal"] for run in runs) > 0.9
    truth = np.load(next(folder.glob("runs/updates/*fedavg*/truth/client-1.npz")))["x_train"]
    assert np.isin(truth[0], signals).all()
    assert "lenet5_relu needs inputs with three dim" in fedcg_simulate(folder / "other", asked).stderr
    assert "augment_flip: applies to images only" in fedcg_simulate(folder / "other", asked, "--flip", *ours).stderr


def test_a_batch_fills_its_folder_and_does_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shown = records_of(fedcg_simulate(folder, BOTH))
    assert [(run["method"], run["seed"]) for run in shown] == [
        ("local", 0), ("fedavg", 0), ("local", 1), ("fedavg", 1)
    ]  # fmt: skip
    with (folder / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == [
        f"digits-{method}-seed{seed}" for method in ("fedavg", "local") for seed in (0, 1)
    ]
    assert [line["bytes_up"] for line in lines] == [
        str(run["bytes"]["up"]) for run in (shown[1], shown[3], *shown[::2])
    ]
    with (folder / "curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "tensorboard").glob("*/events.out.tfevents.*"))) == 4
    assert data_of(fedcg_simulate(folder, BOTH).stdout) == {"runs": [], "failures": []}
    assert len(records_of(fedcg_simulate(folder, "--method local --force --json"))) == 1


def test_each_method_of_a_call_has_the_networks_that_it_needs(tmp_path: Path) -> None:
    runs, names = tmp_path / "runs", ("digits-fedcg-seed0.json", "digits-ppidsg-seed0.json")
    asked = "--method fedcg --method ppidsg --set fedcg.server_iterations=2 --generator mlp_small"
    done = fedcg_simulate(runs, asked)
    assert done.exit_code == 0, done.stderr
    before = [json.loads((runs / name).read_text()) for name in names]
    assert [(run["network"]["split"], run["network"]["generator"]) for run in before] == [
        ("lenet5_relu", "mlp_small"),
        ("image_small", "mlp_small"),
    ]
    other = fedcg_simulate(runs, asked.replace("mlp_small", "mlp3"))
    assert other.exit_code == 2
    assert "digits-fedcg-seed0.json is the record of another setting" in other.stderr
    (runs / names[0]).unlink()  # what was refused has left nothing behind that --resume would run
    assert resume(runs).exit_code == 0
    assert json.loads((runs / names[0]).read_text())["network"]["generator"] == "mlp_small"


def test_crops_reach_the_training_and_the_record(tmp_path: Path) -> None:
    plain, cropped = (
        records_of(fedcg_simulate(tmp_path / str(at), f"--method fedsplit --json {option}"))[0]
        for at, option in enumerate(("", "--crop 2"))
    )
    assert (plain["setting"]["crop"], cropped["setting"]["crop"]) == (0, 2)
    assert [client["curve"]["loss"] for client in plain["clients"]] != [
        client["curve"]["loss"] for client in cropped["clients"]
    ]


def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    failing = "--method fedavg --method local --set fedavg.lr=1e18 --set fedavg.optimiser=sgd --json"
    done = fedcg_simulate(folder, failing)
    assert done.exit_code == 1
    shown = data_of(done.stdout)
    assert "no client could train in any round" in shown["failures"][0]["reason"]
    assert [run["method"] for run in shown["runs"]] == ["local"]
    assert [failure["run"] for failure in shown["failures"]] == ["digits-fedavg-seed0"]
    assert "RunError" in (folder / ".state" / "digits-fedavg-seed0.traceback.txt").read_text()
    assert json.loads((folder / "failures.json").read_text())["failures"] == shown["failures"]
    assert [path.name for path in folder.glob("digits-*.json")] == ["digits-local-seed0.json"]
    assert not list(folder.glob(".state/*/round-*"))
    assert fedcg_simulate(folder, "--method local --force").exit_code == 0
    assert not (folder / "failures.json").exists()


def test_a_run_whose_server_never_merged_says_so_beside_its_figures(tmp_path: Path) -> None:
    done = fedcg_simulate(tmp_path / "runs", "--method fedcg --set server_lr=1e12 --set server_iterations=3")
    assert done.exit_code == 0, done.output
    assert "rounds without a merge: 1 (distillation: " in done.stderr
    assert "undone" not in done.stderr


# What is printed


def test_a_pipe_gets_a_line_per_round_with_its_accuracies_and_the_default_is_quick(tmp_path: Path) -> None:
    done = fedcg_simulate(tmp_path, "--shadow --rounds 2 --method fedavg")
    lines = [line for line in done.stderr.splitlines() if ": round " in line]
    assert [line.split(": accuracy")[0] for line in lines] == [
        f"digits-fedavg-seed0: round {number}/2" for number in (1, 2)
    ]
    assert all("own test personal " in line and "local only " in line for line in lines)
    (planned,) = load_batch(tmp_path).runs
    assert planned.setting.all_params()["lr"] == 1e-3


# Recorded updates


def test_a_user_records_runs_and_compares_a_recording_with_the_private_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = "--rounds 2 --method fedcg --method fedavg --set fedcg.server_iterations=3 --keep-updates 1,2"
    done = fedcg_simulate(out, both)
    assert done.exit_code == 0, done.output
    first = out / "updates" / "digits-fedcg-seed0"
    data = first / "truth" / "client-1.npz"
    beside = (
        f"--auxiliary {first / 'auxiliary.npz'} --out DIR --private {first / 'truth' / 'client-1-round-2.safetensors'}"
    )
    command = f"fedcg audit run --updates {first} --client client-1 --data {data} {beside}"
    assert done.stderr.splitlines()[-1] == f"recorded updates: {out / 'updates'}; audit one with: {command}"
    places = [out / "updates", *(out / "updates").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in places if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in places if path.is_file()} == {0o600}
    for method, code in (("fedcg", 0), ("fedavg", 8)):
        folder = out / "updates" / f"digits-{method}-seed0"
        private = folder / "truth" / "client-2-round-2.safetensors"
        compared = run_fedcg("audit", "compare", "--observed", folder, "--private", private)
        assert compared.exit_code == code, compared.output
        assert run_fedcg("audit", "compare", "--observed", folder / "no", "--private", private).exit_code == NOT_FOUND
    again = resume(out)
    assert again.exit_code == 0
    assert "already done\n" in again.stderr
    forced = fedcg_simulate(out, "--rounds 2 --method fedavg --force")
    assert forced.exit_code == 0, forced.output
    assert not (out / "updates" / "digits-fedavg-seed0").exists()  # of numbers that its record no longer shows
    assert "recorded updates" not in forced.stderr
    late = fedcg_simulate(out, "--rounds 2 --method fedavg --keep-updates all")
    assert late.exit_code == 0
    assert "recorded updates" not in late.stderr
    assert "already done, without a recording of its updates; --force repeats it" in late.stderr


# Mechanisms


def test_a_private_run_states_its_epsilon_in_name_record_and_line(tmp_path: Path) -> None:
    asked = "--rounds 2 --method fedavg --mechanism dp_sgd.noise_multiplier=1.3 --mechanism update_clip=2 --json"
    done = fedcg_simulate(tmp_path, asked)
    (record,) = records_of(done)
    (path,) = tmp_path.glob("*.json")
    assert path.stem == "digits-fedavg-update_clip=2.0-dp_sgd.noise_multiplier=1.3-seed0"
    assert (record["method"], record["mechanisms"]) == ("fedavg", "update_clip=2.0-dp_sgd.noise_multiplier=1.3")
    assert record["setting"]["privacy"]["dp_sgd"]["noise_multiplier"] == 1.3
    accountant = RDPAccountant()
    images = record["clients"][0]["train_images"]
    accountant.history = [(1.3, 16 / images, 2 * -(-images // 16))]
    assert record["clients"][0]["epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-5), abs=1e-4)
    most = max(client["epsilon"] for client in record["clients"])
    assert f"epsilon at most {most:.2f} at delta 1e-05" in done.stderr
    assert "already done" in fedcg_simulate(tmp_path, asked).stderr
    (other,) = records_of(fedcg_simulate(tmp_path, "--rounds 2 --method fedavg --mechanism dropout=0.2 --json"))
    assert "epsilon" not in other["clients"][0]
    assert len(list(tmp_path.glob("*.json"))) == 2


# Images as people have them


ODD = {  # images of a class, and how they are stored, per domain
    "all": ({"a": 16, "b": 16, "c": 16}, "RGB"),
    "grey": ({"a": 16, "b": 16}, "L"),
    "one-class": ({"b": 12}, "RGB"),
    "one-image": ({"c": 1}, "RGB"),
}


def fill(folder: Path, count: int, level: int, mode: str = "RGB") -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        stream = np.random.default_rng([len(folder.parts), level, number])
        pixels = level + stream.integers(0, 60, (16, 16) if mode == "L" else (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def test_odd_clients_take_part_as_far_as_they_can_and_the_record_says_why(tmp_path: Path) -> None:
    for domain, (classes, mode) in ODD.items():
        for label, count in classes.items():
            for part in ("train", "test"):
                fill(tmp_path / "odd" / domain / part / label, count, 60 * "abc".index(label), mode)
    (tmp_path / "odd" / "all" / "train" / "a" / "broken.png").write_bytes(b"\x89PNG and no more")
    dealt = (
        "--partition domains --clients 4 --images-per-client 100 --rounds 2 --test even --validation test-half --json"
    )
    done = fedcg_simulate(tmp_path / "out", f"{dealt} --method fedsplit", "--data", tmp_path / "odd")
    (record,) = records_of(done)
    assert record["skipped"] == [{"file": "a/broken.png", "reason": record["skipped"][0]["reason"]}]
    assert "not an image" in record["skipped"][0]["reason"]
    counts = [client["label_counts"] for client in record["clients"]]
    assert counts == [[16, 16, 16], [16, 16, 0], [0, 12, 0], [0, 0, 1]]
    reasons = [{failure["reason"] for failure in client["failures"]} for client in record["clients"]]
    assert reasons == [set(), set(), set(), {"1 training images: at least 2 are needed"}]
    assert record["server_failures"] == []
    tested = record["clients"][:3]  # the last has nothing to test on
    assert all(client["accuracy_personal"] is not None for client in tested)
    assert "local rounds reverted: 2" in done.stderr
    assert "images skipped: 1" in done.stderr
