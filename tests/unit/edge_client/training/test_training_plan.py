"""How a training process follows `[training]`: device, precision, and the memory that is available when it first trains."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from devices.nvidia import GpuReadings
from devices.profile import GIB, DeviceKind, DeviceProfile, Gpu, Trainable
from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import TrainingSection
from edge_client.training import trainer_child
from edge_client.training.box_limits import MEMORY_FILE
from edge_client.training.trainer_child import free_memory
from fedcg.wire.artifacts.artifacts import read_header
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.edge.training_site import Site, real_spec

CPU_BOX = DeviceProfile(
    DeviceKind.CPU,
    None,
    None,
    "x86_64",
    2,
    8 * GIB,
    None,
    None,
    Trainable(possible=True, reason=""),
    cpu_formats=("f32",),
)
ORIN = replace(CPU_BOX, kind=DeviceKind.JETSON, gpu=Gpu("Orin", 8 * GIB, (8, 7), None, shares_memory=True))
NO_CUDA = "this torch (2.13.0) has no CUDA: install the build for this board"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    threads = torch.get_num_threads()
    yield Site(tmp_path, real_spec(batch_size=8))
    torch.set_num_threads(threads)


def on(monkeypatch: pytest.MonkeyPatch, box: DeviceProfile, problem: str = "", free: int | None = None) -> None:
    """The device is such a box, with a torch that can't use its GPU for that reason."""
    for module in ("edge_client.training.trainer_child", "edge_client.cli.doctor.hardware"):
        monkeypatch.setattr(f"{module}.detect", lambda: box)
        monkeypatch.setattr(f"{module}.torch_obstacle", lambda: problem)
    monkeypatch.setattr(trainer_child, "free_memory", lambda gpu: free)


def configure(site: Site, **training: object) -> None:
    site.configure(training=TrainingSection.model_validate({"threads": 1, **training}))


def doctor(site: Site) -> Finding:
    return examine(site.config, datetime.now(timezone.utc), ["training"])[0]


def test_a_torch_without_cuda_trains_on_the_cpu_for_a_stated_reason_and_the_doctor_warns(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, ORIN, NO_CUDA)
    configure(site, device="auto")
    site.train()
    plan = site.events("plan")[0]
    assert (plan["device"], plan["reason"]) == ("cpu", NO_CUDA)
    found = doctor(site)
    assert (found.state, found.advice) == ("warning", NO_CUDA)
    assert "on the CPU, although there is a GPU (Orin" in found.detail


def test_cuda_that_the_owner_asked_for_and_torch_lacks_is_declined_and_fails_the_doctor(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, ORIN, NO_CUDA)
    configure(site, device="cuda")
    report = site.declined()
    assert report.reason is DeclineReason.NOT_ELIGIBLE
    assert report.detail == f'device = "cuda" under [training] can\'t be had: {NO_CUDA}'
    found = doctor(site)
    assert (found.state, found.detail) == ("failed", report.detail)


def test_a_gpu_that_torch_does_not_find_counts_as_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ORIN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    configure(site, device="cuda")
    report = site.declined()
    assert "check NVIDIA's driver" in report.detail


def test_bf16_is_for_a_cpu_with_instructions_for_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(site, device="cpu", precision="bf16")
    on(monkeypatch, replace(CPU_BOX, cpu_formats=("f32", "int8")))
    report = site.declined()
    assert report.reason is DeclineReason.NOT_ELIGIBLE
    assert 'the CPU of this box has instructions for f32, int8; set precision = "f32"' in report.detail
    assert doctor(site).detail == report.detail
    on(monkeypatch, replace(CPU_BOX, cpu_formats=("f32", "bf16")))
    site.train()


def test_bf16_trains_other_weights_and_its_update_tells_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, replace(CPU_BOX, cpu_formats=("f32", "bf16")))
    updates = {}
    for precision in ("f32", "bf16"):
        one = Site(tmp_path / precision, real_spec(batch_size=8))
        configure(one, device="cpu", precision=precision)
        one.train()
        updates[precision] = one.state(), read_header(one.update()).determinism
    assert updates["bf16"][1] == {**updates["f32"][1], "precision": "bf16"}
    ours, theirs = (updates[one][0].slots["personal"] for one in ("f32", "bf16"))
    assert any((ours[part][name] != theirs[part][name]).any() for part in ours for name in ours[part])


def test_the_batch_follows_what_is_available_before_the_first_round_and_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(free: int) -> object:
        on(monkeypatch, CPU_BOX, free=free)
        trainer = site.trainer()
        trainer._memory.round_begins()
        return site.events("plan")[-1]["batch_scale"]

    configure(site, device="cpu")
    assert share(GIB - 1) == 0.5
    assert share(8 * GIB) == share(1) == 0.5, "another share would give a repeated round other last digits"
    (site.store.root / MEMORY_FILE).unlink()
    assert share(GIB) == 1.0
    assert share(1) == 1.0


def test_memory_is_that_of_a_gpu_of_its_own_and_else_the_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_child, "nvml_readings", lambda: GpuReadings(None, None, None, (), (), free_bytes=7))
    assert free_memory(Gpu("Card", 8 * GIB, (8, 6), None)) == 7
    box = free_memory(None)
    assert box is not None
    assert box > 7
    assert free_memory(ORIN.gpu) != 7
