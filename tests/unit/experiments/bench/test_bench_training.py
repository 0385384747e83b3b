"""`fedcg bench round` and `fedcg bench train`: that they run, and what their figures are made of. No timing is asserted."""

import subprocess
import sys

import pytest

from experiments.bench.fedcg_round import RoundPlan, Stage, median_seconds, whole_round
from tests.support.commands import data_of, run_fedcg

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
    assert whole_round("reference", found, plan) == {"classify": 50.0, "gan": 200.0, "server": 12.0, "round": 262.0}
    seconds = {Stage.CLASSIFY: 1.0, Stage.FEATURES: 0.5, Stage.GAN: 2.0, Stage.TEACHER: 0.25, Stage.STUDENT: 1.0}
    ours = {("ours", stage): taken for stage, taken in seconds.items()}
    # 5 clients two at a time take 3 turns; features once a turn: 3 · (10 · 2 + 0.5). The server: 4 · (1 + 5 · 0.25).
    assert whole_round("ours", ours, plan) == {"classify": 30.0, "gan": 61.5, "server": 9.0, "round": 100.5}
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
    record = data_of(run.stdout)
    assert record["extrapolated"] == {"epochs": [1, 20], "server_iterations": [5, 2000]}
    for name in ("equal_maths", "joint_pass", "compact"):
        assert record[f"speedup_{name}"] == record[name]["speedup"]["round"] > 0
        expected = record["reference_seconds"]["round"] / record[name]["seconds"]["round"]
        assert record[f"speedup_{name}"] == pytest.approx(expected, rel=1e-2)


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
    ("options", "reason"),
    [
        (("cuda:9",), "this torch has cpu"),
        (("cpu", "--split", "nothing"), "no split"),
        (("cpu", "--method", "no"), "no m"),
    ],
)
def test_a_box_that_can_not_be_timed_is_bad_input(options: tuple[str, ...], reason: str) -> None:
    refused = run_fedcg("bench", "train", "--quick", "--device", *options)
    assert refused.exit_code == 2
    assert reason in refused.output


@pytest.mark.parametrize("command", ["infer", "round", "train", "transport"])
def test_the_help_starts_without_torch(command: str) -> None:
    code = (
        "import sys\nfrom fedcg.cli import app\n"
        f"try:\n    app.main(args=['bench', '{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--json" in run.stdout
