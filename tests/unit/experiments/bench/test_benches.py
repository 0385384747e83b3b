"""`fedcg bench train` and `coordinator`: what their figures are made of, and that they run.

No timing is asserted.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench.coordinator_rounds import Round, Run, growth_mb
from fedcg.wire.messages.schemas import Outcome
from tests.support.commands import data_of, run_fedcg


def test_a_box_is_told_in_one_line_with_the_steps_of_its_round() -> None:
    asked = ("bench", "train", "--device", "cpu", "--split", "lenet5_relu", "--quick", "--batch", "8")
    record = data_of(run_fedcg(*asked, "--json").stdout)
    assert record["steps"] == {"classify": 2, "generate": 2}
    assert record["steps_per_second"] == pytest.approx(4 / record["seconds"], rel=0.05)
    assert record["images_per_second"] == pytest.approx(8 * record["steps_per_second"], rel=0.01)
    assert (record["joules"] is None) == (record["rail"] is None)
    assert record["peak_mb"] > 100
    line = run_fedcg(*asked, "--method", "fedsplit").stdout
    assert "fedsplit with lenet5_relu at 32 pixels, batches of 8" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("train --quick --device cuda:9", "this torch has cpu"),
        ("train --quick --device cpu --split nothing", "no split"),
        ("train --quick --device cpu --method no", "no m"),
    ],
)
def test_what_can_not_be_measured_is_bad_input(words: str, reason: str) -> None:
    refused = run_fedcg("bench", *words.split())
    assert refused.exit_code == (7 if "--method no" in words or "nothing" in words else 2), refused.output
    assert reason in refused.output
    assert "Traceback" not in refused.output


def test_the_cost_of_sealed_sums_is_told_for_every_number_of_devices() -> None:
    record = data_of(run_fedcg("bench", "coordinator", "--sum-devices", "4", "--sum-devices", "40", "--json").stdout)
    four, forty = record["sums"]
    assert (four["devices"], four["groups"], forty["groups"]) == (4, 1, 2)
    assert forty["lost"] == 4
    assert four["numbers_bytes"] == forty["numbers_bytes"] == 4 * 2905
    assert forty["control_down"] > four["control_down"] > 0
    assert forty["coordinator_ms"] > four["coordinator_ms"] > 0


@pytest.mark.parametrize("command", ["coordinator", "train"])
def test_the_help_and_the_processes_of_devices_start_without_torch(command: str) -> None:
    code = (
        "import sys, experiments.bench.coordinator_rounds, experiments.bench.sessions\nfrom fedcg.cli import app\n"
        f"try:\n    app.main(args=['bench', '{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--json" in run.stdout


def closed(number: int, memory: float = 300.0) -> Round:
    return Round(number, 1.0, 1.0, 0.5, 0.1, (100.0, memory))


@pytest.mark.broker
@pytest.mark.slow
def test_no_update_of_six_sessions_is_lost(tmp_path: Path) -> None:
    words = ("--sessions", "6", "--rounds", "3", "--out", str(tmp_path), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "fedcg", "bench", "coordinator", *words], check=False, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()
    record = data_of(done.stdout)
    assert record == json.loads((tmp_path / "coordinator.json").read_text())
    assert record["updates"] == {"sent": 18, "accepted": 18, "lost": 0}
    assert [each["round"] for each in record["rounds"]] == [1, 2, 3]
    for each in record["rounds"]:
        coordinator, worker = each["memory_mb"]
        assert coordinator > 30
        # After the last round the worker ends, with torch; before, it is a child of the coordinator.
        assert worker > 100 or each is record["rounds"][-1]
        assert each["update_mb_per_s"] > 6 * 0.01 / each["seconds"]  # an update is over 10 kB
        assert each["processor_s"] > 0
    *offers, last = (each["next_offer_s"] for each in record["rounds"])
    assert all(0 < offer < each["seconds"] for offer, each in zip(offers, record["rounds"], strict=False))
    assert last is None


def test_an_update_without_a_receipt_is_lost() -> None:
    run = Run(receipts={"a": {(1, 1): Outcome.ACCEPTED, (2, 1): None}, "b": {(1, 1): Outcome.REJECTED}})
    assert run.updates() == {"sent": 3, "accepted": 1, "rejected": 1, "lost": 1}


def test_growth_is_the_slope_of_memory_after_the_first_two_rounds() -> None:
    later = [closed(number, memory=300 + 4 * number) for number in range(3, 11)]
    assert growth_mb([closed(1, memory=0), closed(2, memory=50), *later]) == 4.0
    assert growth_mb([closed(1), closed(2), *later[:-1]]) is None
