"""`fedcg simulate --mechanism`: the setting, the name, the record, the printed line, and bad input."""

from pathlib import Path

import pytest
from opacus.accountants import RDPAccountant

from tests.support.commands import data_of, run_fedcg

SMALL = [
    "simulate",
    "--clients",
    "2",
    "--partition",
    "iid",
    "--images-per-client",
    "40",
    "--rounds",
    "2",
    "--local-epochs",
    "1",
    "--image-size",
    "16",
    "--no-shadow",
    "--no-plot",
    "--no-tensorboard",
    "--workers",
    "1",
]


def test_a_private_run_states_its_epsilon_in_name_record_and_line(tmp_path: Path) -> None:
    asked = ["--method", "fedavg", "--mechanism", "dp_sgd.noise_multiplier=1.3", "--mechanism", "update_clip=2"]
    done = run_fedcg(*SMALL, *asked, "--json", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (record,) = data_of(done.stdout)["runs"]
    (path,) = tmp_path.glob("*.json")
    assert path.stem == "digits-fedavg-update_clip=2.0-dp_sgd.noise_multiplier=1.3-seed0"
    assert (record["method"], record["mechanisms"]) == ("fedavg", "update_clip=2.0-dp_sgd.noise_multiplier=1.3")
    assert record["setting"]["privacy"]["dp_sgd"]["noise_multiplier"] == 1.3
    accountant = RDPAccountant()
    images = record["clients"][0]["train_images"]
    accountant.history = [(1.3, 16 / images, 2 * -(-images // 16))]
    epsilon = accountant.get_epsilon(delta=1e-5)
    assert record["clients"][0]["epsilon"] == pytest.approx(epsilon, abs=1e-4)
    most = max(client["epsilon"] for client in record["clients"])
    assert f"epsilon at most {most:.2f} at delta 1e-05" in done.stderr
    again = run_fedcg(*SMALL, *asked, "--out", tmp_path)
    assert "done before" in again.stderr
    other = run_fedcg(*SMALL, "--method", "fedavg", "--mechanism", "dropout=0.2", "--json", "--out", tmp_path)
    assert "epsilon" not in data_of(other.stdout)["runs"][0]["clients"][0]
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_run_out_of_budget_says_so(tmp_path: Path) -> None:
    budget = ["dp_sgd.noise_multiplier=1.3", "dp_sgd.budget_epsilon=4.4"]
    words = [word for pair in budget for word in ("--mechanism", pair)]
    done = run_fedcg(*SMALL, "--method", "fedavg", *words, "--json", "--rounds", "3", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (record,) = data_of(done.stdout)["runs"]
    for client in record["clients"]:
        assert 0 < client["epsilon"] <= 4.4
        assert "privacy budget is used up" in client["failures"][0]["reason"]
    assert "local rounds undone" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--mechanism", "dp_sgd.noise_multiplier=1"], "network.discriminator = mlp"),
        (["--method", "fedmd_cg", "--mechanism", "dp_sgd.noise_multiplier=1"], "can't cover fedmd_cg"),
        (["--mechanism", "noise=1"], "--mechanism noise: no such mechanism"),
        (["--mechanism", "update_clip"], "write KEY=VALUE"),
    ],
)
def test_what_cant_be_had_ends_the_command_before_anything_is_written(
    tmp_path: Path, words: list[str], reason: str
) -> None:
    done = run_fedcg(*SMALL, *words, "--out", tmp_path / "runs")
    assert done.exit_code == 2
    assert reason in done.stderr
    assert not (tmp_path / "runs").exists()
