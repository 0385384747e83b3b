"""`fedcg bench coordinator`: what its figures are made of, and that it runs.

No timing is asserted.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench.coordinator_rounds import Round, Run, growth_mb
from fedcg.wire.messages.schemas import Outcome
from tests.support.commands import data_of


def test_the_help_and_the_processes_of_devices_start_without_torch() -> None:
    code = (
        "import sys, experiments.bench.coordinator_rounds, experiments.bench.sessions\nfrom fedcg.cli import app\n"
        "try:\n    app.main(args=['bench', 'coordinator', '--help'])\nexcept SystemExit:\n    pass\n"
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
