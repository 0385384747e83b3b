"""`fedcg bench round` and `fedcg bench train`: that they run, and what their figures are made of. No timing is asserted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from experiments.bench.learning import gpu
from experiments.bench.learning.round import RoundPlan, _whole
from experiments.bench.learning.steps import STAGES
from experiments.bench.learning.training import Setting, Stage, median_seconds, work_of
from fedcg.learning.spec import NetworkChoice
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


def test_every_stage_that_a_gpu_is_measured_on_runs_and_counts_its_operations() -> None:
    network = NetworkChoice(split="lenet5", generator="mlp", discriminator="mlp", noise_dim=8)
    setting = Setting(
        plain=False, network=network, passes="joint", batch=4, images=8, steps=2, teachers=1, graphs=False
    )
    counted = {stage: gpu.counted_flops(work_of(setting, stage, 2)) for stage in STAGES}
    assert all(flops > 0 for flops in counted.values())
    # Four rows through 400-120-84-10: 2 · 4 · 58,920 operations forward and twice that backward, twice; convolutions come on top.
    assert counted[Stage.CLASSIFY] > 2 * 3 * 2 * 4 * (400 * 120 + 120 * 84 + 84 * 10)


def test_a_share_of_the_peak_is_given_for_known_gpus_alone() -> None:
    assert gpu.peak_flops("NVIDIA H100 PCIe") == 51e12
    assert gpu.peak_flops("NVIDIA H100 80GB HBM3") == 67e12
    assert gpu.peak_flops("NVIDIA A100-SXM4-40GB") == 19.5e12
    assert gpu.peak_flops("NVIDIA A10G") is None
    # 2e9 operations in 1 ms are 2e12 a second: a tenth of 20e12
    assert gpu.achieved(2e9, 1e-3, 20e12)["share_of_peak"] == 0.1
    assert gpu.achieved(2e9, 1e-3, None)["share_of_peak"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_launches_fewer_kernels_than_its_step() -> None:
    network = NetworkChoice(split="lenet5", generator="mlp", discriminator="mlp", noise_dim=8)
    setting = Setting(False, network, "joint", 16, 160, 60, 1, "cuda")  # noqa: FBT003 - `plain`
    for stage in STAGES:
        found = gpu.case(setting, stage, 1)
        assert found["graph_launches"] is not None
        assert found["plain_launches"] is not None
        assert found["graph_launches"] < found["plain_launches"]


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
    run = subprocess.run(
        [*FEDCG, "bench", "train", "--networks", "mlp/mlp", "--batch", "8", *one_thread],
        capture_output=True,
        check=True,
    )
    cases = data_of(run.stdout)["cases"]
    assert [case["stage"] for case in cases] == ["classify", "gan", "student"]


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


@pytest.mark.parametrize("command", ["aggregate", "codec", "infer", "round", "train", "transport"])
def test_the_help_starts_without_torch(command: str) -> None:
    code = (
        "import sys\nfrom fedcg.cli import app\n"
        f"try:\n    app.main(args=['bench', '{command}', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--json" in run.stdout
