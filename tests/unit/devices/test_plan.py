"""Where and how large to train."""

import importlib.machinery
from pathlib import Path

import pytest

from devices.detect import detect
from devices.nvidia import torch_obstacle
from devices.profile import (
    GIB,
    MIB,
    DeviceKind,
    DeviceProfile,
    Gpu,
    NotTrainableError,
    Trainable,
    batch_share,
    plan_training,
)

TREES = Path(__file__).parents[2] / "golden" / "devices"


def box(
    *, cpus: int | None = 4, memory: int | None = 8 * GIB, gpu: Gpu | None = None, trainable: bool = True
) -> DeviceProfile:
    kind = DeviceKind.CPU if gpu is None else DeviceKind.CUDA
    return DeviceProfile(kind, None, None, "x86_64", cpus, memory, gpu, None, Trainable(trainable, "as the test says"))


def card(memory: int | None = 8 * GIB, capability: tuple[int, int] | None = (8, 6)) -> Gpu:
    return Gpu("Card", memory, capability, None)


@pytest.mark.parametrize(("cpus", "threads"), [(None, 1), (1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (64, 4)])
def test_the_cpu_keeps_one_core_free_and_never_uses_more_threads_than_help(cpus: int | None, threads: int) -> None:
    plan = plan_training(box(cpus=cpus))
    assert (plan.device, plan.threads) == ("cpu", threads)
    assert plan_training(box(cpus=cpus), threads=0).threads == threads  # 0 in the configuration: the profile decides


@pytest.mark.parametrize(
    ("gpu", "device", "word"),
    [
        (card(), "cuda", "Card"),
        (card(memory=None, capability=None), "cuda", "Card"),
        (card(capability=(3, 7)), "cpu", "compute capability 3.7"),
        (card(memory=1 * GIB), "cpu", "1024 MiB"),
        (None, "cpu", "no NVIDIA GPU"),
    ],
)
def test_a_gpu_is_used_if_it_can_train_and_else_the_reason_is_said(gpu: Gpu | None, device: str, word: str) -> None:
    plan = plan_training(box(gpu=gpu))
    assert plan.device == device
    assert word in plan.reason


@pytest.mark.parametrize(
    ("memory", "gpu", "scale"),
    [
        (2 * GIB, None, 1.0),
        (2 * GIB - 1, None, 0.5),
        (800 * MIB, None, 0.25),
        (None, None, 1.0),
        (32 * GIB, card(memory=6 * GIB), 1.0),
        (32 * GIB, card(memory=4 * GIB), 0.5),
        (32 * GIB, card(memory=2 * GIB), 0.25),
        (32 * GIB, card(memory=None), 1.0),
    ],
)
def test_the_batch_shrinks_with_the_training_devices_memory(memory: int | None, gpu: Gpu | None, scale: float) -> None:
    assert plan_training(box(memory=memory, gpu=gpu)).batch_scale == scale


def test_a_box_that_cannot_train_is_refused_with_the_reason_unless_the_operator_decided() -> None:
    profile = detect(TREES / "jetson-xavier-nx")
    with pytest.raises(NotTrainableError, match=r"Xavier.*Python 3\.8"):
        plan_training(profile)
    plan = plan_training(profile, device="cpu", threads=2)
    assert (plan.device, plan.threads) == ("cpu", 2)
    assert "configuration" in plan.reason


def test_a_torch_without_cuda_leaves_the_cpu_and_says_so_unless_the_operator_asked_for_the_gpu() -> None:
    plan = plan_training(box(gpu=card()), gpu_problem="this torch has no CUDA")
    assert (plan.device, plan.reason) == ("cpu", "this torch has no CUDA")
    with pytest.raises(
        NotTrainableError, match=r'device = "cuda" under \[training\] can.t be used: this torch has no CUDA'
    ):
        plan_training(box(gpu=card()), device="cuda", gpu_problem="this torch has no CUDA")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cuda: Optional[str] = None", "this torch (2.9.1+cpu) has no CUDA: install the build for this board"),
        ("cuda: Optional[str] = '12.8'", ""),
        ("", ""),
    ],
)
def test_whether_torch_has_cuda_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9.1+cpu'\n{line}\nhip: Optional[str] = None\n")
    spec = importlib.machinery.PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr("devices.nvidia.find_spec", lambda name: spec)
    told = torch_obstacle()
    assert told.startswith(found)
    assert bool(told) == bool(found)


@pytest.mark.parametrize(("free", "scale"), [(None, 1.0), (GIB, 1.0), (GIB - 1, 0.5), (GIB // 2 - 1, 0.25), (0, 0.25)])
def test_half_of_what_is_available_is_left_to_others(free: int | None, scale: float) -> None:
    assert (batch_share(box(), "cpu", free), batch_share(box(memory=MIB), "cpu", free)) == (scale, 0.25)
