"""`fedcg bench attacks`: one hostile client, with and without the defence."""

import json
from pathlib import Path

import pytest
import torch

from experiments.bench.attacked_run import ATTACKS
from experiments.bench.attacks_command import table as table_of_attacks
from fedcg.learning.method import Update
from fedcg.wire.parts import Part
from tests.support.commands import data_of, run_fedcg


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("attacks --attack sealed-noise", "fedcg seals nothing"),
        ("attacks --attack charm", f"no attack charm; there are {', '.join(list(ATTACKS)[:2])}"),
    ],
)
def test_what_there_is_not_is_named(words: str, said: str) -> None:
    done = run_fedcg("bench", *words.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


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
