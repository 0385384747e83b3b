"""`fedcg bench coordinator`: a real coordinator and Mosquitto, sessions that replay an update, watchers; and what is worked out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench.coordinator_rounds import Round, Run, Setting, cost_of_watchers, growth_mb
from fedcg.wire.messages.schemas import Outcome
from tests.support.commands import data_of, run_fedcg


def closed(number: int, watchers: int | None = 0, seconds: float = 1.0, memory: float = 300.0) -> Round:
    return Round(number, watchers, seconds, 0.5 * seconds, 0.1 * seconds, (100.0, memory))


@pytest.mark.broker
@pytest.mark.slow
def test_no_update_of_six_sessions_is_lost_while_two_watch(tmp_path: Path) -> None:
    words = ("--sessions", "6", "--rounds", "3", "--watchers", "2", "--turns", "1", "--out", str(tmp_path), "--json")
    done = subprocess.run(
        [sys.executable, "-m", "fedcg", "bench", "coordinator", *words], check=False, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()
    record = data_of(done.stdout)
    assert record == json.loads((tmp_path / "coordinator.json").read_text())
    assert record["updates"] == {"sent": 36, "accepted": 36, "lost": 0}
    assert [each["watchers"] for each in record["rounds"]] == [None, 0, 0, None, 2, 2]
    for each in record["rounds"]:
        coordinator, worker = each["memory_mb"]
        assert coordinator > 30
        # After the last round the worker ends, with torch; before, it is a child of the coordinator.
        assert worker > 100 or each is record["rounds"][-1]
        assert each["seconds"] > 0
        assert each["processor_s"] > 0
    *offers, last = (each["next_offer_s"] for each in record["rounds"])
    assert all(0 < offer < each["seconds"] for offer, each in zip(offers, record["rounds"], strict=False))
    assert last is None
    assert record["watching"]["events"] >= 2 * 6  # of each watcher, at least the updates that were stored
    assert record["watching"]["pages"] >= 2
    assert record["watching"]["seconds"]["ratio"] > 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_processes_of_devices_import_no_torch() -> None:
    code = "import sys, experiments.bench.coordinator_rounds, experiments.bench.sessions; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"False"


def test_watchers_come_in_every_second_turn() -> None:
    setting = Setting(sessions=1, rounds=3, watchers=5, turns=2)
    assert setting.all_rounds == 12
    numbers = range(1, 13)
    assert [setting.watchers_in(number) for number in numbers] == [0, 0, 0, 5, 5, 5, 0, 0, 0, 5, 5, 5]
    assert [number for number in numbers if setting.begins_turn(number)] == [1, 4, 7, 10]
    assert Setting(sessions=1, rounds=3, watchers=0, turns=1).all_rounds == 3


def test_an_update_without_a_receipt_is_lost() -> None:
    run = Run(receipts={"a": {(1, 1): Outcome.ACCEPTED, (2, 1): None}, "b": {(1, 1): Outcome.REJECTED}})
    assert run.updates() == {"sent": 3, "accepted": 1, "rejected": 1, "lost": 1}


def test_growth_is_the_slope_of_memory_after_the_first_two_rounds() -> None:
    later = [closed(number, memory=300 + 4 * number) for number in range(3, 11)]
    assert growth_mb([closed(1, memory=0), closed(2, memory=50), *later]) == 4.0
    assert growth_mb([closed(1), closed(2), *later[:-1]]) is None


def test_the_cost_of_watchers_is_the_ratio_of_medians_of_neighbouring_turns() -> None:
    alone = [closed(1, None, 90.0), closed(2, 0, 2.0), closed(3, 0, 4.0)]
    watched = [closed(4, None, 90.0), closed(5, 50, 3.0), closed(6, 50, 6.0)]
    again = [closed(7, None, 90.0), closed(8, 0, 4.0), closed(9, 0, 4.0)]
    more = [closed(10, None, 90.0), closed(11, 50, 8.0), closed(12, 50, 8.0)]
    found = cost_of_watchers([*alone, *watched, *again, *more], 3)["seconds"]
    assert found == {"without": [3.0, 4.0], "with": [4.5, 8.0], "ratios": [1.5, 2.0], "ratio": 1.75}


def test_two_rounds_a_turn_leave_nothing_to_compare_and_are_refused() -> None:
    refused = run_fedcg("bench", "coordinator", "--watchers", 5, "--rounds", 2)
    assert refused.exit_code == 2
    assert "give 3 or" in refused.output


def test_the_cost_of_a_masked_sum_grows_with_the_devices_and_its_numbers_stay_4_bytes() -> None:
    words = (
        "bench",
        "coordinator",
        "--sum-devices",
        8,
        "--sum-devices",
        16,
        "--lost",
        0.25,
        "--numbers",
        100,
        "--json",
    )
    shown = run_fedcg(*words)
    assert shown.exit_code == 0, shown.output
    few, many = data_of(shown.stdout)["sums"]
    assert (few["devices"], few["lost"], many["devices"], many["lost"]) == (8, 2, 16, 4)
    assert few["numbers_bytes"] == many["numbers_bytes"] == 400
    assert few["control_up"] < many["control_up"]
    assert min(few["device_ms"], many["coordinator_ms"]) > 0.0


def test_devices_that_are_too_few_to_open_a_sum_end_it_with_a_sentence() -> None:
    shown = run_fedcg("bench", "coordinator", "--sum-devices", 4, "--lost", 0.5)
    assert shown.exit_code != 0
    assert "2 devices are too few to open a sum: 4 are needed" in shown.output
