"""The real aggregation worker, with torch, in its own process: whole federations, and SIGKILL in the middle of a phase."""

import math
import os
import subprocess
import sys
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation import jobs
from coordinator.aggregation.worker import Throttle
from coordinator.aggregation.worker_handle import MAX_DEATHS, AggregationWorker
from coordinator.operations.create_federation import InitialArtifacts, make_artifacts, read_plan
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import read_header, unpack
from fedcg.wire.messages.schemas import Outcome
from tests.support.coordinator.driven_worker import DrivenWorker, worker_settings
from tests.support.coordinator.toy_artifacts import shared_layouts
from tests.support.coordinator.world import RunningService, World

PLAN = """
federation = "tiny"
classes = ["x", "y", "z"]
method = "{method}"
rounds = {rounds}
seed = 3
[input]
mode = "L"
height = 28
width = 28
mean = [0.5]
std = [0.5]
[network]
noise_dim = 8
generator = "mlp_small"
[params]
epochs = 1
{params}
"""
JOB = jobs.Job("tiny", 1, 1, "0" * 64, "1" * 64, "2" * 64)
FEDCG = "server_iterations = 400\nserver_batch = 8"


def plan_file(folder: Path, method: str = "fedcg", rounds: int = 2, params: str = FEDCG) -> Path:
    path = folder / f"{method}.toml"
    path.write_text(PLAN.format(method=method, rounds=rounds, params=params))
    return path


def founded(folder: Path, *plan: Any, public: Path | None = None) -> tuple[InitialArtifacts, ArtifactStore]:
    """The first artifacts of a planned federation."""
    made = make_artifacts(read_plan(plan_file(folder, *plan)), folder / "artifacts", public, 5)
    return made, ArtifactStore(folder / "artifacts")


def real_world(root: Path, ids: InitialArtifacts, store: ArtifactStore, **options: Any) -> World:
    """A world with the real worker."""
    spec = FederationSpec.parse(store.get(ids.spec))
    return World(
        root, spec, store.get(ids.aggregate), store.get(ids.server_state), make_worker=AggregationWorker, **options
    )


def run_to_the_end(world: World) -> str:
    """A whole federation of two scripted devices; returns the final aggregate's id."""
    with closing(world), RunningService(world):
        world.start_devices()
        return world.wait_finished()


@pytest.mark.slow
def test_two_rounds_run_with_the_real_worker(tmp_path: Path) -> None:
    world = real_world(tmp_path / "home", *founded(tmp_path))
    final = run_to_the_end(world)
    for device in world.devices.values():
        assert [receipt.outcome for receipt in device.receipts()] == [Outcome.ACCEPTED] * 2
    header = read_header(world.artifacts.get(final))
    assert (header.kind, header.round, header.attempt, header.client) == ("aggregate", 2, 1, "coordinator")
    assert header.determinism["threads"] == "1"
    assert header.determinism["batch_plan"] == '{"batch_size":16,"server_batch":8,"server_iterations":400}'
    assert header.base == world.events("aggregate_stored")[0]["artifact"] != world.base_id
    unpack(world.artifacts.get(final), shared_layouts(world.spec))
    assert not list((world.root / "spill").glob("*/*/*"))


def test_what_makes_every_worker_fail_ends_as_a_failed_job_not_as_a_loop(tmp_path: Path) -> None:
    with DrivenWorker(worker_settings(tmp_path)) as worker:
        worker.worker.open(JOB)
        assert "No such file" in worker.until(jobs.JobFailed).reason
    assert not any(isinstance(event, jobs.WorkerDied) for event in worker.events)


@pytest.mark.slow
def test_a_worker_that_keeps_dying_gives_its_job_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", _die_at_once)
    monkeypatch.setattr("coordinator.aggregation.worker_handle.MAX_BACKOFF_S", 0.01)
    with DrivenWorker(worker_settings(tmp_path)) as worker:
        worker.worker.open(JOB)
        worker.until(jobs.JobFailed)
    deaths = [event.deaths for event in worker.events if isinstance(event, jobs.WorkerDied)]
    assert deaths == list(range(1, MAX_DEATHS + 1))


def _die_at_once(*_: object) -> None:
    os._exit(9)


def test_a_busy_worker_that_reads_late_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", _talk_before_reading)
    with DrivenWorker(worker_settings(tmp_path)) as worker:
        worker.worker.open(JOB)
        for number in range(MANY):
            worker.worker.add(f"device-{number}", "3" * 64)
        worker.until(jobs.WorkerReady)
        worker.worker.finish((), {})  # returns at once, whatever the worker does
        assert worker.until(jobs.JobDone).size == MANY


MANY = 3000


def _talk_before_reading(connection: Connection, _settings: jobs.WorkerSettings) -> None:
    connection.send(jobs.WorkerReady(os.getpid(), 1, "cpu"))
    for number in range(MANY):
        connection.send(jobs.Progressed(1, 1, os.getpid(), "teacher", number, MANY))
    requests = [connection.recv() for _ in range(MANY + 2)]
    added = sum(isinstance(request, jobs.AddUpdate) for request in requests)
    connection.send(jobs.JobDone(1, 1, "4" * 64, added, "5" * 64))
    connection.recv()


def test_a_report_of_a_distillation_has_its_last_loss_and_a_teacher_pass_none() -> None:
    sent: list[Any] = []
    throttle = Throttle(JOB, sent.append, lambda: 0.0)
    for step, loss in ((1, 0.75), (4, 0.5), (6, math.inf), (8, 0.25)):
        throttle.watch_loss(loss)
        throttle("distil", step, 9)
        throttle("distil", step + 1, 9)  # within a fifth of a second; the last one is reported all the same
    throttle("teacher", 1, 1)
    reported = [(event.step, event.loss) for event in sent]
    assert reported == [(1, 0.75), (4, 0.5), (6, None), (8, 0.25), (9, 0.25), (1, None)]


def test_the_coordinators_own_process_loads_no_torch() -> None:
    code = "import sys, coordinator.cli.run, coordinator.cli.coordinator_commands, coordinator.broker.access_lists; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_stopped_worker_stays_stopped_until_it_is_started_again(tmp_path: Path) -> None:
    with DrivenWorker(worker_settings(tmp_path)) as worker:
        first = worker.until(jobs.WorkerReady).pid
        worker.worker.stop()
        assert not Path(f"/proc/{first}").exists()
        worker.drain(1.0)
        assert not any(isinstance(event, jobs.WorkerDied) for event in worker.events)
        worker.events.clear()
        worker.worker.start()
        assert worker.until(jobs.WorkerReady).pid != first
