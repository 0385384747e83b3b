"""`fedcg bench round` and `fedcg bench train`: that they run, and what their figures are made of. No timing is asserted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedcg.learning.bench_round import RoundPlan, _whole
from fedcg.learning.bench_training import Stage, median_seconds

FEDCG = [sys.executable, "-m", "fedcg"]


def test_a_round_is_the_sum_of_its_stages_times_how_often_each_runs() -> None:
    plan = RoundPlan(
        clients=5, processes=2, epochs=20, measured_epochs=2, server_iterations=2000, measured_iterations=500
    )
    found = {
        ("reference", stage): seconds
        for stage, seconds in ((Stage.CLASSIFY, 1.0), (Stage.GAN, 4.0), (Stage.STUDENT, 3.0))
    }
    # 5 clients one after the other, 10 times what was measured; the server 4 times.
    assert _whole("reference", found, plan) == {"classify": 50.0, "gan": 200.0, "server": 12.0, "round": 262.0}
    seconds = {Stage.CLASSIFY: 1.0, Stage.FEATURES: 0.5, Stage.GAN: 2.0, Stage.TEACHER: 0.25, Stage.STUDENT: 1.0}
    ours = {("ours", stage): taken for stage, taken in seconds.items()}
    # 5 clients two at a time take 3 turns; features once a turn: 3 · (10 · 2 + 0.5). The server: 4 · (1 + 5 · 0.25).
    assert _whole("ours", ours, plan) == {"classify": 30.0, "gan": 61.5, "server": 9.0, "round": 100.5}
    assert plan.is_extrapolated
    assert not RoundPlan(measured_epochs=20, measured_iterations=2000).is_extrapolated


def test_measurements_are_taken_in_turn_and_their_medians_told() -> None:
    order: list[str] = []
    values = {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 5.0, 9.0])}

    def job(name: str) -> float:
        order.append(name)
        return next(values[name])

    assert median_seconds([lambda: job("a"), lambda: job("b")], 3) == [2.0, 5.0]
    assert order == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.slow
def test_the_quick_measurements_print_their_ratios_as_json() -> None:
    one_thread = ["--threads", "1", "--quick", "--json"]
    run = subprocess.run([*FEDCG, "bench", "round", "--processes", "1", *one_thread], capture_output=True, check=True)
    told = json.loads(run.stdout)
    assert told["extrapolated"] == {"epochs": [1, 20], "server_iterations": [5, 2000]}
    for name in ("equal_maths", "joint_pass", "compact"):
        assert told[f"speedup_{name}"] == told[name]["speedup"]["round"] > 0
        expected = told["reference_seconds"]["round"] / told[name]["seconds"]["round"]
        assert told[f"speedup_{name}"] == pytest.approx(expected, rel=1e-2)
    run = subprocess.run(
        [*FEDCG, "bench", "train", "--networks", "mlp/mlp", "--batch", "8", *one_thread],
        capture_output=True,
        check=True,
    )
    cases = json.loads(run.stdout)["cases"]
    assert [case["stage"] for case in cases] == ["classify", "gan", "student"]


@pytest.mark.parametrize("command", ["round", "train"])
def test_the_help_starts_without_torch(command: str) -> None:
    code = (
        "import sys\nfrom fedcg.cli import app\n"
        f"try:\n    app.main(args=['bench', '{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--quick" in run.stdout
