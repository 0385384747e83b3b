"""`fedcg bench privacy`: grids, their tables, one real cell; `fedcg bench attacks`: one hostile client, with and without the defence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.bench.attacked_run import ATTACKS
from experiments.bench.attacks_command import table as table_of_attacks
from experiments.bench.privacy_grids import grids, strongest, summary
from fedcg.learning.method import Update
from fedcg.wire.parts import Part
from tests.support.commands import data_of, run_fedcg


def figure(setting: str, gain: float, *, given: bool = False, of_update: bool = True) -> dict[str, Any]:
    interval = {"value": gain, "low": gain - 0.1, "high": gain + 0.1}
    value = {"value": gain + 0.5, "low": 0.0, "high": 1.0}
    named = {"name": "reid", "title": "Re-identification", "setting": setting, "unit": "share"}
    bounds = {"floor": 0.5, "floor_is": "chance", "ceiling": 1.0}
    return {**named, **bounds, "value": value, "gain": interval, "is_ceiling": given, "is_of_update": of_update}


def record(seed: int, figures: list[dict[str, Any]], *, passed: bool = True) -> dict[str, Any]:
    attack = {"name": "reidentification", "figures": figures, "controls": [{"passed": passed}]}
    cell = {"grid": "methods", "row": "FedAvg", "column": "", "seed": seed}
    accuracies = {"accuracy": 0.5 + 0.1 * seed, "accuracy_after": None}
    return {**cell, **accuracies, "epsilon": None, "attacks": [attack]}


def test_the_strongest_setting_is_on_the_update_and_no_ceiling() -> None:
    batch, true = figure("batch", 0.4, of_update=False), figure("true", 0.5, given=True)
    found = strongest(record(0, [batch, figure("a", 0.1), figure("b", 0.2), true]), "reid")
    assert found is not None
    assert found["setting"] == "b"
    only_batch = strongest(record(0, [batch, true]), "reid")
    assert only_batch is not None
    assert only_batch["setting"] == "batch"
    assert strongest(record(0, []), "reid") is None


def test_the_summary_has_means_over_seeds_and_marks_what_proves_nothing() -> None:
    *_, row = summary([record(0, [figure("a", 0.1)]), record(1, [figure("a", 0.2)], passed=False)])
    # Accuracies 0.5 and 0.6: mean 55, standard deviation 7.07; values 0.6 and 0.7: 65; gains 0.1 and 0.2: 15.
    assert row == "| FedAvg | 55 ± 7.1 | - | - | 65 ± 7.1 (15 ± 7.1) ? |"
    *_, row = summary([record(0, [figure("batch", 0.1, of_update=False)])])
    assert row == "| FedAvg | 50 | - | - | 60 (10) * |"


def test_every_grid_has_runs_with_names_of_their_own() -> None:
    for grid in grids().values():
        cells = list(grid.cells())
        assert len({(row, column) for row, column, _ in cells}) == len(cells) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("privacy grid", "no grid 'grid'; there are methods"),
        ("privacy methods --row FedX", "has no row FedX; it has FedAvg"),
        ("attacks --attack sealed-noise", "fedcg seals nothing"),
        ("attacks --attack charm", f"no attack charm; there are {', '.join(list(ATTACKS)[:2])}"),
    ],
)
def test_what_there_is_not_is_named(words: str, said: str) -> None:
    done = run_fedcg("bench", *words.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_a_cell_is_simulated_audited_recorded_and_not_done_again(tmp_path: Path) -> None:
    small = "--images 60 --epochs 1 --clients 3"
    words = f"bench privacy ppidsg --row FedAvg --seed 0 {small}".split()
    done = run_fedcg(*words, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "ppidsg").iterdir())
    assert [file.name for file in files] == ["digits-fedavg-relu-seed0.json", "digits-fedavg-sigmoid-seed0.json"]
    written = json.loads(files[0].read_text())
    assert {attack["name"] for attack in written["attacks"]} == {"labels", "membership"}
    assert written["commands"][0].startswith("fedcg simulate --data digits")
    assert str(tmp_path) not in files[0].read_text()
    before = [file.stat().st_mtime_ns for file in files]
    assert run_fedcg(*words, "--out", tmp_path).stdout == done.stdout
    assert [file.stat().st_mtime_ns for file in files] == before


QUICK = "bench attacks --rounds 1 --epochs 1 --images 60 --clients 4 --seed 0"


@pytest.mark.slow
def test_an_update_of_a_hundred_steps_is_merged_without_the_defence_and_not_with_it(tmp_path: Path) -> None:
    words = (*f"{QUICK} --set server_iterations=5 --attack x100 --out".split(), tmp_path)
    shown = run_fedcg(*words)
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "digits-iid-fedcg-seed0.json"
    cases = {(case["attack"], case["defended"]): case for case in json.loads(path.read_text())["cases"]}
    assert len(cases) == 5
    screened = {entry["client"]: entry for entry in cases["x100", True]["screened"]}
    assert [screened[f"client-{number}"]["weight"] > 0 for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "times as long as the median" in screened["client-4"]["reason"]
    assert not cases["x100", False]["screened"]
    assert "| x100 |" in shown.stdout
    written_at = path.stat().st_mtime_ns
    assert run_fedcg(*words).stdout == shown.stdout
    assert data_of(run_fedcg(*words, "--json").stdout)[0]["cases"]
    assert path.stat().st_mtime_ns == written_at


def test_an_attack_on_sealed_parts_leaves_what_the_coordinator_reads_as_it_is() -> None:
    honest = Update("box", {part: {"weight": torch.arange(1.0, 5.0)} for part in (Part.EXTRACTOR, Part.CLASSIFIER)}, 7)
    base = {part: {"weight": torch.zeros(4)} for part in honest.parts}
    sent = ATTACKS["sealed-sign-flipped-x10"](honest, base, torch.Generator()).parts
    assert torch.equal(sent[Part.EXTRACTOR]["weight"], -10 * torch.arange(1.0, 5.0))
    assert sent[Part.CLASSIFIER] == honest.parts[Part.CLASSIFIER]
    mixed = ATTACKS["sealed-permuted"](honest, base, torch.Generator().manual_seed(0)).parts
    assert sorted(found := mixed[Part.EXTRACTOR]["weight"].tolist()) == [1.0, 2.0, 3.0, 4.0] != found


def test_the_classifier_is_attacked_in_rounds_that_send_it_and_others_pass() -> None:
    moments = Update("box", {Part.STATISTICS: {"sums": torch.ones(2)}}, 7)
    classifier = Update("box", {Part.CLASSIFIER: {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}}, 7)
    for name in ("label-shuffled", "constant-class"):
        assert ATTACKS[name](moments, {}, torch.Generator()).parts == moments.parts
    sent = ATTACKS["constant-class"](classifier, {}, torch.Generator()).parts[Part.CLASSIFIER]
    assert [one.flatten().tolist() for one in sent.values()] == [6 * [0.0], [50.0, 0.0, 0.0]]


def test_the_table_has_the_mean_and_every_seed() -> None:
    def attacked(accuracy: float, weight: int) -> dict[str, object]:
        screened = [{"client": "client-1", "weight": 5}, {"client": "client-2", "weight": weight}]
        cases = [
            {"attack": "noise", "defended": False, "accuracy": 10.0, "screened": []},
            {"attack": "noise", "defended": True, "accuracy": accuracy, "deployed": 70.0, "screened": screened},
        ]
        return {"cases": cases}

    *_, line = table_of_attacks([attacked(80.0, 0), attacked(90.0, 7)])
    assert line == "| noise | 10.0 (10.0 / 10.0) |  | 85.0 (80.0 / 90.0) | 70.0 (70.0 / 70.0) | 1 of 2; honest 2 of 2 |"
