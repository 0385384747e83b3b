"""`fedcg bench attacks`: one hostile client, with and without the defence; what a record holds is not computed again."""

import json
from pathlib import Path

import pytest

from experiments.bench.attacked_run import ATTACKS
from experiments.bench.attacks_command import table
from tests.support.commands import data_of, run_fedcg

QUICK = ("--rounds", 1, "--epochs", 1, "--images", 60, "--clients", 4, "--seed", 0, "--set", "server_iterations=5")


@pytest.mark.slow
def test_an_update_of_a_hundred_steps_is_merged_without_the_defence_and_not_with_it(tmp_path: Path) -> None:
    words = ("bench", "attacks", *QUICK, "--attack", "x100", "--out", tmp_path)
    shown = run_fedcg(*words)
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "digits-iid-fedcg-seed0.json"
    record = json.loads(path.read_text())
    cases = {(case["attack"], case["defended"]): case for case in record["cases"]}
    assert len(cases) == 5
    screened = {entry["client"]: entry for entry in cases["x100", True]["screened"]}
    assert [screened[f"client-{number}"]["weight"] > 0 for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "times as long as the median" in screened["client-4"]["reason"]
    assert not cases["x100", False]["screened"]
    assert "| x100 |" in shown.stdout
    written_at = path.stat().st_mtime_ns
    again = run_fedcg(*words)
    assert again.stdout == shown.stdout
    assert data_of(run_fedcg(*words, "--json").stdout)[0]["cases"]
    assert path.stat().st_mtime_ns == written_at


def test_an_unknown_attack_is_refused_with_the_names_that_there_are() -> None:
    refused = run_fedcg("bench", "attacks", *QUICK, "--attack", "charm")
    assert refused.exit_code == 2
    assert all(name in refused.output for name in ("charm", *list(ATTACKS)[:2]))


def test_probes_can_be_attacked_where_there_are_any_and_no_defence_sees_it() -> None:
    refused = run_fedcg("bench", "attacks", *QUICK, "--attack", "probes-x10")
    assert refused.exit_code == 2
    assert "on fedcg" in refused.output
    words = (*QUICK[:-2], "--method", "fedprobe")
    done = run_fedcg("bench", "attacks", *words, "--attack", "probes-highest", "--json")
    assert done.exit_code == 0, done.output
    cases = {(one["attack"], one["defended"]): one for one in data_of(done.stdout)[0]["cases"]}
    hostile = cases["probes-highest", True]
    assert all(entry["weight"] > 0 for entry in hostile["screened"])
    assert hostile["accuracy"] == cases["probes-highest", False]["accuracy"] > 0


def test_the_table_has_the_mean_and_every_seed() -> None:
    def record(accuracy: float, weight: int) -> dict[str, object]:
        screened = [{"client": "client-1", "weight": 5}, {"client": "client-2", "weight": weight}]
        cases = [
            {"attack": "noise", "defended": False, "accuracy": 10.0, "screened": []},
            {"attack": "noise", "defended": True, "accuracy": accuracy, "screened": screened},
        ]
        return {"cases": cases}

    *_, line = table([record(80.0, 0), record(90.0, 7)])
    assert line == "| noise | 10.0 (10.0 / 10.0) | 85.0 (80.0 / 90.0) | 1 of 2; honest 2 of 2 |"
