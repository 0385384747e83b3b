"""One update is followed from the device's store to the aggregation worker: its way is the one that docs/reference/protocol.md shows."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import pytest
from pydantic import BaseModel

from coordinator.aggregation import worker_handle
from coordinator.rounds.records import ParticipantState
from edge_client.agent.loop import Agent
from edge_client.identity.credentials import AgentKeys
from edge_client.link.coordinator_link import offline_will
from edge_client.session.signals import RoundCommitted, TrainerCommand, TrainRound
from edge_client.store.private_store import PrivateStore
from edge_client.training.trainer_handle import TrainerReport
from fedcg.event_log import EventLog
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.transfer.chunk_sender import ChunkFile
from tests.support.broker.memory import MemoryTransport
from tests.support.coordinator.driven_worker import THREADS_FILE, count_and_note_threads
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.edge.world import FakeTrainer, make_config, toy_generation
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "protocol.md"
_SEND = Connection.send
PACKAGES = ("coordinator", "edge_client", "fedcg")
PLACES = {  # by the beginning of a thread's name
    "agent": "device: the agent's loop",
    "memory-a": "device: the link's thread",
    "memory-coordinator": "coordinator: the link's thread",
    "receiver": "coordinator: the receiver",
    "service": "coordinator: the loop",
}


def documented() -> list[tuple[str, str]]:
    """The steps that the document shows, in their order, with the place of each; the last one has only to come after the receipt."""
    rest = DOCUMENT.read_text(encoding="utf-8").partition("| where | file: function |\n|---|---|\n")[2]
    table = rest.partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [(place, step.strip("`")) for place, steps in rows for step in steps.split("<br>")]


STEPS = documented()


@dataclass
class Trace:
    """Calls into our packages with an argument in which an artifact is named, in their order, by thread."""

    artifact: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    sent_on: list[str] = field(default_factory=list)  # the threads that wrote it into the worker's pipe
    worker_threads: list[str] = field(default_factory=list)  # that took it out of the pipe and counted it

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """For `threading.setprofile`: note a call when it is about the artifact."""
        path = frame.f_code.co_filename
        if not self.artifact or event != "call" or not path.startswith(str(ROOT)) or "/tests/" in path:
            return
        file = os.path.relpath(path, ROOT)
        if file.split("/")[0] in PACKAGES and any(self.names(value, 4) for value in list(frame.f_locals.values())):
            self.calls.append((threading.current_thread().name, f"{file}: {frame.f_code.co_name}"))

    def send(self, connection: Connection, value: object) -> None:
        """For `Connection.send`: note on which thread a value about the artifact is sent."""
        if self.artifact and self.names(value, 4):
            self.sent_on.append(threading.current_thread().name)
        _SEND(connection, value)

    def names(self, value: object, depth: int) -> bool:
        """Whether the artifact's id is somewhere in a value."""
        if isinstance(value, str):
            return self.artifact in value
        if isinstance(value, bytes | memoryview):
            return bytes.fromhex(self.artifact) in bytes(value) or self.artifact.encode() in bytes(value)
        if depth == 0:
            return False
        if isinstance(value, tuple):
            return any(self.names(item, depth - 1) for item in value)
        if isinstance(value, BaseModel):
            return any(self.names(getattr(value, name), depth - 1) for name in type(value).model_fields)
        if isinstance(value, ChunkFile):
            ref = getattr(value, "ref", None)  # not there yet while it is made
            return ref is not None and self.artifact == ref.id
        if is_dataclass(value) and not isinstance(value, type):
            return any(self.names(getattr(value, item.name, None), depth - 1) for item in fields(value))
        return False

    def first(self, step: str) -> int:
        """When a step was taken first; ValueError for one that was not."""
        return [function for _, function in self.calls].index(step)

    def place(self, step: str) -> str:
        """On which thread, in words."""
        thread, _ = self.calls[self.first(step)]
        return next(text for name, text in PLACES.items() if thread.startswith(name))


class HeldTrainer(FakeTrainer):
    """Commits one update at once, and reports it when it may; what the training process does before is a test of its own."""

    def __init__(self, world: World, store: PrivateStore, deliver: Callable[[TrainerReport], None]) -> None:
        super().__init__(store, world.spec, deliver)
        self._device = world.devices["a"]
        self.may_go = threading.Event()
        self.update = b""

    def work(self, command: TrainerCommand) -> None:
        assert isinstance(command, TrainRound)
        attempt = command.round_attempt
        self.update = self._device.make_update(attempt.round, attempt.attempt, command.aggregate)
        self.store.generations.commit(toy_generation(self.spec, attempt, self.update))
        threading.Thread(target=self._report, args=(RoundCommitted(attempt),), daemon=True).start()

    def _report(self, report: RoundCommitted) -> None:
        self.may_go.wait()
        self.deliver(report)


def followed(folder: Path) -> Trace:
    """Follow the update of the one device of a federation until the worker has counted it and its receipt is stored."""
    spec = tiny_spec(rounds=1)
    world = World(folder / "home", spec, clients=("a",), min_clients=1, make_worker=worker_handle.AggregationWorker)
    config = make_config(folder).model_copy(update={"federation": spec.federation, "device": "a"})
    store = PrivateStore.open(config.store, spec.federation, "a")
    trainers: list[HeldTrainer] = []

    def make_trainer(deliver: Callable[[TrainerReport], None]) -> HeldTrainer:
        trainers.append(HeldTrainer(world, store, deliver))
        return trainers[0]

    own = world.devices["a"].key
    transport = MemoryTransport(world.broker, "a", offline_will(spec.federation, "a", own))
    events = EventLog(folder / "device.jsonl", time.time)
    agent = Agent(config, store, AgentKeys(own, world.key.public), transport, make_trainer, events)
    thread = threading.Thread(target=agent.run, name="agent", daemon=True)
    trace = Trace()
    threading.setprofile(trace.profile)
    patch = pytest.MonkeyPatch()
    patch.setattr(Connection, "send", lambda connection, value: trace.send(connection, value))
    try:
        with RunningService(world):
            thread.start()
            wait_until(lambda: bool(trainers and trainers[0].update), "the update is committed")
            key = (spec.federation, RoundAttempt(1, 1))
            wait_until(lambda: world.store.participants(*key)[0].state is ParticipantState.ACCEPTED, "accepted")
            world.wait_event("worker_ready")
            trace.artifact = artifact_id(trainers[0].update)
            trainers[0].may_go.set()
            world.wait_event("teacher_done")
            wait_until(lambda: bool(store.deliveries()), "the receipt is stored")
            agent.stop()
            thread.join()
    finally:
        threading.setprofile(None)
        patch.undo()
    trace.worker_threads = (world.artifacts.root / THREADS_FILE).read_text().splitlines()
    world.close()
    return trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_handle, "worker_main", count_and_note_threads)
        return followed(tmp_path_factory.mktemp("followed"))


def test_the_document_shows_the_way_that_an_update_takes(trace: Trace) -> None:
    assert len(STEPS) > 20
    assert [(trace.place(step), step) for _, step in STEPS] == STEPS
    taken = [trace.first(step) for _, step in STEPS]
    assert taken[:-1] == sorted(taken[:-1])
    assert taken[-1] > trace.first("coordinator/messaging/publisher.py: receipt")


def test_an_update_changes_threads_and_processes_four_times_from_its_last_chunk_to_the_worker(trace: Trace) -> None:
    last_chunk = ("coordinator: the link's thread", "coordinator/updates/receiver.py: frame")
    places = [place for place, _ in STEPS[STEPS.index(last_chunk) : -1]]
    places += [f"coordinator: {name}" for name in trace.sent_on]
    places += [f"worker: {name}" for name in trace.worker_threads]
    assert [place for place, _ in groupby(places)] == [
        "coordinator: the link's thread",
        "coordinator: the receiver",
        "coordinator: the loop",
        "coordinator: fedcg-aggregation-write",
        "worker: MainThread",
    ]
