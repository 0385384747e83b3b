"""A round that is interrupted goes on from its checkpoint to the same bytes; a process that hangs is killed and replaced."""

import hashlib
import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from coordinator.aggregation.jobs import Job, JobDone, JobFailed, WorkerDied, WorkerReady
from edge_client.config import PolicySection, TrainingSection
from edge_client.session.signals import RoundCommitted, TrainerReady, TrainRound
from edge_client.store.generations import CheckpointFile
from edge_client.training.trainer_handle import TrainerReport, trainer_process
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import OFF, DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import NetworkChoice, ParameterValue
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.learning.training.device_errors import BROKEN_EXIT
from fedcg.log_output import LogSettings
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import ReportField
from tests.support.coordinator import driven_worker
from tests.support.coordinator.driven_worker import STALL_S, DrivenWorker, worker_settings
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import aggregate_of, make_config
from tests.support.raising import raising

EPOCHS = 3
METHODS = ("fedcg", "fedavg", "fedprox", "fedsplit", "local", "fedmd_cg", "fedgh", "ppidsg")
QUICK = ("fedcg", "fedsplit", "fedgh")
PRIVATE = NetworkChoice(noise_dim=8, discriminator="mlp_plain")
SETTINGS = {
    "noise": PrivacySettings(gradient_noise=0.01, dropout=0.2),
    "balance": PrivacySettings(balance="logits"),
    "dp_sgd": PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0, clip=1.0)),
}


class KilledError(BaseException):
    """Ends a round as a signal would: nothing catches it."""


def site_of(
    root: Path,
    method: str,
    privacy: PrivacySettings | None,
    *,
    every_s: float,
    shadow: int = 0,
    params: Mapping[str, ParameterValue] = MappingProxyType({}),
) -> Site:
    site = Site(
        root, real_spec(method, network=None if privacy is None else PRIVATE, epochs=EPOCHS, **params), shadow=shadow
    )
    training = TrainingSection(shadow_every=shadow, device="cpu", threads=1, checkpoint_s=every_s)
    policy = PolicySection(
        allow_upload=get_method(method).payload.up,
        allow_report=site.config.policy.allow_report | {ReportField.LABEL_COUNTS},
    )
    site.configure(training=training, policy=policy, privacy=privacy or OFF)
    return site


def count_saves(monkeypatch: pytest.MonkeyPatch, killed_after: int | None = None) -> list[int]:
    """Checkpoint after every block, and end the process' work after one of them; the list has the number of checkpoints."""
    saves = [0]
    real = CheckpointFile.save

    def counted(file: CheckpointFile, mark: bytes, tensors: Any) -> None:
        real(file, mark, tensors)
        saves[0] += 1
        if saves[0] == killed_after:
            raise KilledError

    monkeypatch.setattr(CheckpointFile, "save", counted)
    return saves


def result(site: Site) -> tuple[str, dict[str, bytes]]:
    state = site.state()
    tensors = {f"{slot}/{name}": data for slot in state.slots for name, data in site.weights(slot).items()}
    tensors |= {
        f"{extra}/{name}": array.tobytes() for extra, arrays in state.extras.items() for name, array in arrays.items()
    }
    return hashlib.sha256(site.update()).hexdigest(), tensors


def check_every_interruption(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    privacy: PrivacySettings | None = None,
    *,
    shadow: int = 0,
    params: Mapping[str, ParameterValue] = MappingProxyType({}),
) -> None:
    site_with = partial(site_of, shadow=shadow, params=params)
    reference = site_with(tmp_path / "reference", method, privacy, every_s=0)
    reference.train()
    kept = site_with(tmp_path / "kept", method, privacy, every_s=1e-9)
    with monkeypatch.context() as patch:
        saves = count_saves(patch)
        kept.train()
    assert result(kept) == result(reference)
    assert saves[0] >= EPOCHS
    assert not (kept.store.root / "checkpoint.bin").exists()
    for at in sorted({1, 2, saves[0] // 2, saves[0] // 2 + 1, saves[0] - 1, saves[0]}):
        site = site_with(tmp_path / f"killed-{at}", method, privacy, every_s=1e-9)
        with monkeypatch.context() as patch:
            count_saves(patch, killed_after=at)
            with pytest.raises(KilledError):
                site.train()
        with monkeypatch.context() as patch:
            again = count_saves(patch)
            site.train()
        assert result(site) == result(reference), at
        assert again[0] == saves[0] - at, "blocks before the checkpoint are not trained on again"


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_round_that_is_interrupted_after_any_checkpoint_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    check_every_interruption(tmp_path, monkeypatch, method, shadow=int(method == "fedcg"))


def test_a_moving_average_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_interruption(tmp_path, monkeypatch, "fedsplit", params={"ema": 0.9})


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["noise", "balance", "dp_sgd"])
def test_streams_of_mechanisms_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    check_every_interruption(tmp_path, monkeypatch, "fedcg", SETTINGS[setting])


def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = site_of(root, "fedavg", None, every_s=1e-9)
    with monkeypatch.context() as patch:
        count_saves(patch, killed_after=2)
        with pytest.raises(KilledError):
            site.train()
    return site


def test_a_bad_checkpoint_is_reported_and_the_round_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = interrupted(tmp_path, monkeypatch)
    path = site.store.root / "checkpoint.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    saves = count_saves(monkeypatch)
    site.train()
    (refused,) = site.events("refused")
    assert "checkpoint.bin is damaged; the round starts from the beginning" in refused["detail"]
    assert saves[0] >= EPOCHS


@pytest.mark.parametrize("other", ["attempt", "settings", "aggregate"])
def test_a_checkpoint_of_another_round_or_of_other_settings_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    site = interrupted(tmp_path, monkeypatch)
    command = site.round()
    if other == "attempt":
        command = site.round(1, 2)
    elif other == "settings":
        site.configure(privacy=PrivacySettings(dropout=0.1))
    else:
        first = initial_parts(site.spec, spec_root(site.spec.seed))
        parts = to_arrays({part: first[part] for part in get_method("fedavg").payload.down})
        command = replace(command, aggregate=site.store.artifacts.put(aggregate_of(parts, site.spec, 1)))
    saves = count_saves(monkeypatch)
    assert site.trainer().do(command) == RoundCommitted(command.round_attempt)
    assert saves[0] >= EPOCHS
    assert site.events("refused") == []


def test_a_full_disk_costs_checkpoints_and_not_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, "fedavg", None, every_s=1e-9)

    monkeypatch.setattr(CheckpointFile, "save", raising(OSError(28, "No space left on device")))
    site.train()
    assert "No space left on device" in site.events("refused")[0]["detail"]


JOB = Job("tiny", 1, 1, "0" * 64, "1" * 64, "2" * 64)


@pytest.mark.slow
def test_a_working_or_idle_training_process_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.training.trainer_handle.run_child", driven_worker.work_slowly_then_idle)
    reports: queue.SimpleQueue[TrainerReport] = queue.SimpleQueue()
    training = TrainingSection(device="cpu", threads=1, stall_s=STALL_S)
    config = make_config(tmp_path).model_copy(update={"training": training})
    process = trainer_process(config, LogSettings(), reports.put)
    try:
        process.start()
        assert reports.get(timeout=30) == TrainerReady()
        process.send(TrainRound(RoundAttempt(1, 1), "s", "a"))
        assert reports.get(timeout=30) == RoundCommitted(RoundAttempt(1, 1))
        with pytest.raises(queue.Empty):
            reports.get(timeout=3 * STALL_S)
    finally:
        process.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_life", "reason"),
    [
        (driven_worker.hang_once, "no progress for 1 s"),
        (driven_worker.break_the_card_once, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_an_aggregation_worker_that_hangs_or_whose_card_broke_is_replaced_and_the_job_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_life: Callable[..., None], reason: str
) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", first_life)
    settings = worker_settings(tmp_path)
    settings.artifacts.mkdir()
    with DrivenWorker(
        replace(settings, stall_s=STALL_S) if first_life is driven_worker.hang_once else settings
    ) as driven:
        driven.worker.open(JOB)
        driven.worker.add("a", "3" * 64)
        driven.worker.finish((("a", "3" * 64, 1),), {})
        driven.until(JobDone, JobFailed)
    said = driven.events
    died = [event for event in said if isinstance(event, WorkerDied)]
    assert [(event.deaths, event.reason.startswith(reason)) for event in died] == [(1, True)], died
    assert len({event.pid for event in said if isinstance(event, WorkerReady)}) == 2
    assert said[-1] == JobDone(1, 1, "9" * 64, 1, "8" * 64)
    assert BROKEN_EXIT != 0
