"""`fedcg simulate --paper`: the published settings, and what the command line puts over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import simulate_command as simulate_cli
from experiments.simulation.batch import Batch, load_batch
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


def test_a_table_without_methods_is_all_its_methods_with_all_its_seeds(asked: list[Batch], tmp_path: Path) -> None:
    code, error = _call("--paper", "fedcg:table1:digits-domains", "--out", str(tmp_path))
    assert code == 0, error
    runs = asked[0].runs
    assert {run.setting.method for run in runs} == {
        *("local", "fedavg", "fedprox", "feddf", "fedsplit", "fedgen", "fedcg")
    }
    assert len(runs) == 5 * (6 + 4)
    assert all(run.setting.rounds == 100 and run.reduced == {} for run in runs)
    assert load_batch(tmp_path) == asked[0]


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


def test_a_run_that_an_earlier_table_shows_too_is_recorded_under_that_one(asked: list[Batch], tmp_path: Path) -> None:
    code, error = _call(
        *("--paper", "fedmd_cg:table3:cifar10-w1@r50", "--data", "digits", "--lr", "0.05", "--seed", "4"),
        *("--method", "fedmd_cg/kdc", "--method", "fedmd_cg/kd", "--out", str(tmp_path)),
    )
    assert code == 0, error
    assert {(run.setting.paper, run.setting.variant, run.setting.seed) for run in asked[0].runs} == {
        ("fedmd_cg:table1:cifar10-w1@r50", "lr=0.05", 4),
        ("fedmd_cg:table3:cifar10-w1@r50", "kd-lr=0.05", 4),
    }


def test_one_method_of_a_table_gets_another_network_and_its_record_lists_it(asked: list[Batch], tmp_path: Path) -> None:
    code, error = _call(
        *("--paper", "ppidsg:table4:digits@small", "--method", "fedavg/", "--method", "ppidsg", "--seed", "0"),
        *("--network", "fedavg=lenet5", "--out", str(tmp_path)),
    )
    assert code == 0, error
    networks = {run.setting.method: (run.setting.network, tuple(run.reduced["network"])) for run in asked[0].runs}
    assert networks == {
        "fedavg": ("lenet5", ("lenet5_relu", "lenet5")),
        "ppidsg": ("image_small", ("image_paper", "image_small")),
    }


def test_rows_of_ppidsgs_table_are_run_and_stand_beside_its_figures(tmp_path: Path) -> None:
    code, error = _call(
        *("--paper", "ppidsg:table4:digits@small", "--method", "fedavg/", "--method", "fedavg/gc-40"),
        *("--method", "ppidsg", "--seed", "0", "--clients", "2", "--images-per-client", "40", "--rounds", "1"),
        *("--local-epochs", "1", "--image-size", "16", "--workers", "1", "--no-plot", "--no-tensorboard"),
        *("--out", str(tmp_path)),
    )
    assert code == 0, error
    pruned = "ppidsg-table4-digits-small-fedavg-gc-40-prune=0.4-seed0.json"
    assert json.loads((tmp_path / pruned).read_text())["mechanisms"] == "prune=0.4"
    (table,) = data_of(run_fedcg("tables", "--runs", tmp_path, "--json").stdout)["tables"]
    assert [line["row"]["label"] for line in table["lines"]] == ["FedAvg", "GC3 40%", "PPIDSG"]
    assert all({"after", "personal"} <= line["figures"].keys() for line in table["lines"])
    assert {(order["claim"]["lower"], order["measure"]) for order in table["orders"]} == {
        (row, measure) for row in ("fedavg", "fedavg/gc-40") for measure in ("after", "personal")
    }


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
        (("--paper", "fedcg:table1:digits-domains", "--method", "fedper"), "has no row 'fedper'"),
        (("--paper", "fedcg:table1:digits-domains", "--variant", "mine"), "names the variants itself"),
        (("--paper", "fedcg:table1:digits-domains", "--rounds", "0"), "rounds"),
        (("--paper", "antigan:table1:celeba-2"), "needs --data with the class folders female and male"),
        (
            ("--paper", "antigan:table3:digits-2", "--method", "fedavg/densenet"),
            "can't be run; it needs DenseNet-121's",
        ),
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
