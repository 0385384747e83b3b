"""`fedcg bench transport`: what it works out of its measurements, and that a case really goes over a broker."""

import subprocess
import sys

import pytest

from experiments.bench.transport_rounds import Case, Measured, filled
from tests.support.commands import data_of


def test_small_artifacts_come_from_as_many_sessions_as_fill_the_window() -> None:
    assert filled(250_000, 16, 40_000_000) == Case(250_000, 16, count=32, sessions=5)
    assert filled(250_000, 64, 40_000_000) == Case(250_000, 64, count=7, sessions=21)
    assert filled(57_000_000, 64, 40_000_000) == Case(57_000_000, 64, count=1, sessions=1)


def test_the_throughput_is_that_of_the_median_run() -> None:
    measured = Measured(Case(1_000_000, 16, 6, sessions=2), (4.0, 3.0, 9.0))
    assert measured.mb_per_s == 3.0
    assert measured.as_json()["mb_per_s"] == 3.0


@pytest.mark.broker
@pytest.mark.slow
def test_a_small_case_and_a_small_round_are_measured_over_mosquitto(mosquitto_factory: object) -> None:
    command = [sys.executable, "-m", "fedcg", "bench", "transport", "--json", "--repeats", "1", "--size", "30000"]
    runs = (("--window", "4", "--megabytes", "1"), ("--sessions", "3", "--rounds", "1"))
    case, one_round = (
        data_of(subprocess.run([*command, *more], check=True, capture_output=True, timeout=120).stdout) for more in runs
    )
    assert [(entry["size"], entry["window"], entry["sessions"]) for entry in case["cases"]] == [(30_000, 4, 4)]
    assert case["cases"][0]["mb_per_s"] > 0
    assert (one_round["sessions"], one_round["size"], len(one_round["round_s"])) == (3, 30_000, 1)
