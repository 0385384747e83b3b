"""The real aggregation worker, with torch, in its own process: whole federations, and SIGKILL in the middle of a phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation.worker import Throttle
from coordinator.aggregation.worker_handle import MAX_DEATHS, AggregationWorker
from coordinator.aggregation.worker_messages import (
    AddUpdate,
    Job,
    JobDone,
    JobFailed,
    Progressed,
    WorkerDied,
    WorkerReady,
    WorkerSettings,
)
from coordinator.service.create_federation import InitialArtifacts, make_artifacts, read_plan
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import read_header, unpack
from fedcg.wire.messages.messages import Outcome
from tests.support.coordinator.driven_worker import DrivenWorker
from tests.support.coordinator.world import RunningService, World, shared_layouts
from tests.support.waiting import wait_until

PLAN = """
federation = "tiny"
classes = ["x", "y", "z"]
method = "{method}"
rounds = {rounds}
seed = 3
[image]
mode = "L"
height = 28
width = 28
mean = [0.5]
std = [0.5]
[network]
noise_dim = 8
[params]
epochs = 1
{params}
"""
JOB = Job("tiny", 1, 1, "0" * 64, "1" * 64, "2" * 64)
FEDCG = "server_iterations = 400\nserver_batch = 8"


def driven(folder: Path) -> DrivenWorker:
    return DrivenWorker(WorkerSettings(1, "cpu", b"s" * 32, folder / "artifacts", folder / "spill"))


def plan_file(folder: Path, method: str = "fedcg", rounds: int = 2, params: str = FEDCG) -> Path:
    path = folder / f"{method}.toml"
    path.write_text(PLAN.format(method=method, rounds=rounds, params=params))
    return path


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> tuple[InitialArtifacts, ArtifactStore]:
    folder = tmp_path_factory.mktemp("founded")
    return make_artifacts(read_plan(plan_file(folder)), folder / "artifacts"), ArtifactStore(folder / "artifacts")


def real_world(root: Path, founded: tuple[InitialArtifacts, ArtifactStore]) -> World:
    ids, store = founded
    spec = FederationSpec.parse(store.get(ids.spec))
    return World(root, spec, store.get(ids.aggregate), store.get(ids.server_state), make_worker=AggregationWorker)


def run_to_the_end(world: World, disturb: Callable[[RunningService], RunningService] | None = None) -> str:
    """A whole federation of two scripted devices; returns the final aggregate's id."""
    running = RunningService(world)
    with running:
        world.start_devices()
        again = running if disturb is None else disturb(running)
        final = world.wait_event("finished")["aggregate"]
        for device in world.devices.values():
            wait_until(partial(device.artifacts.__contains__, final), f"{device.name} has the final aggregate")
        again.stop()
    world.close()
    return str(final)


@pytest.fixture(scope="module")
def peaceful(
    tmp_path_factory: pytest.TempPathFactory, founded: tuple[InitialArtifacts, ArtifactStore]
) -> tuple[World, str]:
    """A federation that nobody disturbed, over, and its final aggregate."""
    world = real_world(tmp_path_factory.mktemp("undisturbed"), founded)
    return world, run_to_the_end(world)


@pytest.fixture(scope="module")
def undisturbed(peaceful: tuple[World, str]) -> str:
    return peaceful[1]


def test_two_rounds_run_with_the_real_worker(peaceful: tuple[World, str]) -> None:
    world, final = peaceful
    for device in world.devices.values():
        assert [receipt.outcome for receipt in device.receipts()] == [Outcome.ACCEPTED] * 2
    header = read_header(world.artifacts.get(final))
    assert (header.kind, header.round, header.attempt, header.client) == ("aggregate", 2, 1, "coordinator")
    assert header.determinism["threads"] == "1"
    assert header.determinism["batch_plan"] == '{"batch_size":16,"server_batch":8,"server_iterations":400}'
    assert header.base == world.events("aggregate_stored")[0]["artifact"] != world.base_id
    unpack(world.artifacts.get(final), shared_layouts(world.spec))
    assert not list((world.root / "spill").glob("*/*/*"))


def distilling(world: World, round_number: int) -> dict[str, Any]:
    """Wait until the student's loop of a round is under way."""

    def found() -> list[dict[str, Any]]:
        return [
            event
            for event in world.events("aggregate_step")
            if event["phase"] == "distil" and event["round"] == round_number and 0 < event["step"] < event["steps"]
        ]

    wait_until(lambda: bool(found()), "distillation is under way")
    return found()[0]


def entries(world: World, phase: str, round_number: int) -> set[int]:
    return {
        event["pid"]
        for event in world.events("phase_started")
        if event["phase"] == phase and event["round"] == round_number
    }


def test_a_worker_killed_while_it_distils_is_started_again_and_ends_with_the_same_bytes(
    tmp_path: Path, founded: tuple[InitialArtifacts, ArtifactStore], undisturbed: str
) -> None:
    world = real_world(tmp_path, founded)

    def disturb(running: RunningService) -> RunningService:
        os.kill(distilling(world, 1)["pid"], signal.SIGKILL)
        return running

    assert run_to_the_end(world, disturb) == undisturbed
    assert len(entries(world, "distil", 1)) == 2
    assert len(world.events("worker_died")) == 1
    assert {attempt.attempt for attempt in world.store.attempts("tiny")} == {1}


def test_a_method_that_shares_nothing_runs_over_the_same_wire(tmp_path: Path) -> None:
    ids = make_artifacts(read_plan(plan_file(tmp_path, "local", rounds=1, params="")), tmp_path / "artifacts")
    world = real_world(tmp_path / "home", (ids, ArtifactStore(tmp_path / "artifacts")))
    final = run_to_the_end(world)
    assert read_header(world.artifacts.get(final)).codecs == {}
    update = world.devices["a"].receipts()[0].artifact
    assert read_header(world.artifacts.get(update)).codecs == {}


def test_what_makes_every_worker_fail_ends_as_a_failed_job_not_as_a_loop(tmp_path: Path) -> None:
    with driven(tmp_path) as worker:
        worker.worker.open(JOB)
        assert "FileNotFoundError" in worker.until(JobFailed).reason
    assert not any(isinstance(event, WorkerDied) for event in worker.events)


@pytest.mark.slow
def test_a_worker_that_keeps_dying_gives_its_job_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", _die_at_once)
    monkeypatch.setattr("coordinator.aggregation.worker_handle.MAX_BACKOFF_S", 0.01)
    with driven(tmp_path) as worker:
        worker.worker.open(JOB)
        worker.until(JobFailed)
    deaths = [event.deaths for event in worker.events if isinstance(event, WorkerDied)]
    assert deaths == list(range(1, MAX_DEATHS + 1))


def _die_at_once(*_: object) -> None:
    os._exit(9)


def test_a_worker_that_talks_much_and_reads_late_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", _talk_before_reading)
    with driven(tmp_path) as worker:
        worker.worker.open(JOB)
        for number in range(MANY):
            worker.worker.add(f"device-{number}", "3" * 64)
        worker.until(WorkerReady)
        worker.worker.finish((), {})  # returns at once, whatever the worker does
        assert worker.until(JobDone).size == MANY


MANY = 3000


def _talk_before_reading(connection: Connection, _settings: WorkerSettings) -> None:
    connection.send(WorkerReady(os.getpid(), 1, "cpu"))
    for number in range(MANY):
        connection.send(Progressed(os.getpid(), 1, 1, "teacher", number, MANY))
    requests = [connection.recv() for _ in range(MANY + 2)]
    added = sum(isinstance(request, AddUpdate) for request in requests)
    connection.send(JobDone(1, 1, "4" * 64, added, "5" * 64))
    connection.recv()


def test_progress_is_told_at_the_first_step_then_sparsely_and_at_the_last() -> None:
    told: list[Any] = []
    now = [0.0]
    throttle = Throttle(Job("tiny", 1, 1, "", "", ""), told.append, lambda: now[0])
    for phase in ("teacher", "distil"):
        for step in range(1, 101):
            now[0] += 0.01
            throttle(phase, step, 100)
    steps = [(event.phase, event.step) for event in told if isinstance(event, Progressed)]
    assert steps[0] == ("teacher", 1)
    assert ("teacher", 100) in steps
    assert ("distil", 1) in steps
    assert steps[-1] == ("distil", 100)
    assert len(steps) < 20


def test_the_coordinators_own_process_loads_no_torch() -> None:
    code = "import sys, coordinator.cli.run, coordinator.cli.coordinator_commands, coordinator.broker.access_lists; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
