"""`fedcg simulate --paper`: the published settings, and what the command line puts over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.cli import simulate_command as simulate_cli
from experiments.simulation.batch import Batch, load_batch
from tests.support.commands import run_fedcg


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--paper", "fedcg:table8"), "no table 'fedcg:table8'"),
        (("--paper", "fedcg:table1:digit5"), "needs --data with the domain folders"),
        (("--paper", "fedcg:table1:digits-domains", "--method", "fedper"), "has no row 'fedper'"),
        (("--paper", "fedcg:table1:digits-domains", "--variant", "mine"), "names the variants itself"),
        (("--paper", "fedcg:table1:digits-domains", "--rounds", "0"), "rounds"),
    ],
)
def test_a_table_that_cannot_be_run_is_bad_input(
    asked: list[Batch], tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    code, error = _call(*arguments, "--out", str(tmp_path))
    assert (code, asked) == (2, [])
    assert reason in error
