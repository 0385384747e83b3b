"""`fedcg simulate --paper`: the published settings, and what the command line puts over them."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import simulate_command as simulate_cli
from experiments.simulation.batch import Batch
from tests.support.commands import data_of, run_fedcg


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that the command would have run."""
    batches: list[Batch] = []

    def remember(batch: Batch, *_: Any, **__: Any) -> None:
        batches.append(batch)

    monkeypatch.setattr(simulate_cli, "_run", remember)
    return batches


def _call(*arguments: str) -> tuple[int, str]:
    done = run_fedcg("simulate", *arguments)
    return done.exit_code, done.stderr


def test_options_over_a_table_override_it_and_are_listed_in_the_record(asked: list[Batch], tmp_path: Path) -> None:
    code, error = _call(
        *("--paper", "fedcg:table1:digits-domains", "--method", "fedcg", "--seeds", "1-2", "--rounds", "2"),
        *("--set", "fedcg.server_iterations=5", "--generator", "mlp", "--out", str(tmp_path)),
    )
    assert code == 0, error
    runs = asked[0].runs
    assert [run.setting.seed for run in runs] == [1, 2]
    assert {name: tuple(pair) for name, pair in runs[0].reduced.items()} == {
        "rounds": (100, 2),
        "generator": ("conv", "mlp"),
        "params.server_iterations": (2000, 5),
    }
    assert runs[0].setting.network == "lenet5"


def test_the_degradation_by_a_defence_is_a_column_of_anti_gans_table(tmp_path: Path) -> None:
    code, error = _call(
        *("--paper", "antigan:table1:digits-2@digits", "--method", "fedavg/", "--method", "fedavg/antigan"),
        *("--seed", "0", "--rounds", "2", "--images-per-client", "60", "--image-size", "16", "--workers", "1"),
        *("--defence-set", "gan_steps=2", "--defence-set", "obfuscation_steps=1", "--defence-set", "width=8"),
        *("--defence-set", "features=gabor", "--no-plot", "--no-tensorboard", "--out", str(tmp_path)),
    )
    assert code == 0, error
    runs = {
        run["variant"]: run for run in map(json.loads, map(Path.read_text, sorted(tmp_path.glob("antigan-*.json"))))
    }
    assert runs["antigan"]["defence"].startswith("antigan-gan_steps=2")
    assert [client["label_counts"].count(0) for client in runs["antigan"]["clients"]] == [5, 5]
    (table,) = data_of(run_fedcg("tables", "--runs", tmp_path, "--json").stdout)["tables"]
    whole, mixed = (runs[variant]["mean"]["global_accuracy_last"] for variant in ("", "antigan"))
    figures = {line["row"]["key"]: line["figures"]["adr"]["mean"] for line in table["lines"]}
    assert figures == {"fedavg": 0.0, "fedavg/antigan": pytest.approx(100 * (whole - mixed) / whole)}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--paper", "fedcg:table8"), "no table 'fedcg:table8'"),
        (("--paper", "fedcg:table1:digit5"), "needs --data with the domain folders"),
        (("--paper", "fedcg:table1:digits-domains", "--variant", "mine"), "names the variants itself"),
        (("--paper", "fedcg:table1:digits-domains", "--rounds", "0"), "rounds"),
        (
            ("--paper", "ppidsg:table7:digits", "--network", "fedcg=lenet5"),
            "'fedcg' is not one of the methods of this call",
        ),
    ],
)
def test_a_table_that_cannot_be_run_is_bad_input(
    asked: list[Batch], tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    code, error = _call(*arguments, "--out", str(tmp_path))
    assert (code, asked) == (2, [])
    assert reason in error
