"""A process that hangs without dying is killed and replaced, with the reason: real processes, stopped by SIGSTOP."""

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.aggregation.jobs import (
    Job,
    JobDone,
    JobFailed,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerSettings,
)
from edge_client.config import TrainingSection
from edge_client.session.signals import RoundCommitted, TrainerReady, TrainRound
from edge_client.training.trainer_handle import TrainerReport, trainer_process
from fedcg.learning.training.device_errors import BROKEN_EXIT
from fedcg.log_output import LogSettings
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator import driven_worker
from tests.support.coordinator.driven_worker import STALL_S, DrivenWorker, worker_settings
from tests.support.edge.world import make_config

JOB = Job("tiny", 1, 1, "0" * 64, "1" * 64, "2" * 64)


@pytest.mark.slow
def test_a_training_process_that_works_or_has_nothing_to_do_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def merged_despite(settings: WorkerSettings) -> list[WorkerEvent]:
    settings.artifacts.mkdir()
    with DrivenWorker(settings) as driven:
        driven.worker.open(JOB)
        driven.worker.add("a", "3" * 64)
        driven.worker.finish((("a", "3" * 64, 1),), {})
        driven.until(JobDone, JobFailed)
    return driven.events


@pytest.mark.slow
def test_an_aggregation_worker_that_hangs_is_replaced_and_the_job_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", driven_worker.hang_once)
    said = merged_despite(replace(worker_settings(tmp_path), stall_s=STALL_S))
    died = [event for event in said if isinstance(event, WorkerDied)]
    assert [(event.deaths, event.reason) for event in died] == [(1, "no progress for 1 s")]
    ready = [event.pid for event in said if isinstance(event, WorkerReady)]
    assert len(set(ready)) == 2
    assert said[-1] == JobDone(1, 1, "9" * 64, 1, "8" * 64)


@pytest.mark.slow
def test_a_worker_whose_card_broke_ends_and_another_process_does_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", driven_worker.break_the_card_once)
    said = merged_despite(worker_settings(tmp_path))
    died = [event for event in said if isinstance(event, WorkerDied)]
    assert [event.reason for event in died] == ["RuntimeError: CUDA error: an illegal memory access was encountered"]
    assert len({event.pid for event in said if isinstance(event, WorkerReady)}) == 2
    assert not any(isinstance(event, JobFailed) for event in said)
    assert BROKEN_EXIT != 0
