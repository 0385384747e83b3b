"""A small federation around one agent: images, a spec, a private store, and a coordinator that a test scripts by hand."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edge_client.agent.loop import Agent
from edge_client.config import AgentConfig, BrokerSection, DataSection, ExportSection, PolicySection, TrainingSection
from edge_client.identity.credentials import AgentKeys
from edge_client.link.coordinator_link import offline_will
from edge_client.session import signals
from edge_client.store.generations import Generation, Generations, NewGeneration, Snapshot, SnapshotFile
from edge_client.store.private_store import FINALISED_FILE, PrivateStore
from edge_client.training.trainer_handle import TrainerReport
from fedcg.event_log import EventLog, EventValue, read_events
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, ParameterValue
from fedcg.wire.artifacts.artifacts import ArtifactHeader, pack
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import COORDINATOR, Hello, Manifest, RoundAttempt
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, VOLUNTARY_REPORT, Part, Report, ReportField, TensorLayout
from fedcg.worker_process import Exited
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.waiting import wait_until

FEDERATION = "shapes"
DEVICE = "site-1"
CLASSES = ("bar", "dot", "ring")
SHARED = (Part.CLASSIFIER, Part.GENERATOR)
FORM = ImageForm(mode="L", height=32, width=32, mean=(0.5,), std=(0.5,))
DEADLINE_S = 20.0
LAYOUTS = {
    Part.CLASSIFIER: (
        TensorLayout(name="bias", dtype="float32", shape=(3,)),
        TensorLayout(name="weight", dtype="float32", shape=(3, 4)),
    ),
    Part.EXTRACTOR: (TensorLayout(name="weight", dtype="float32", shape=(4, 5)),),
    Part.GENERATOR: (
        TensorLayout(name="count", dtype="int64", shape=()),
        TensorLayout(name="weight", dtype="float32", shape=(4, 2)),
    ),
}


def toy_spec(
    *,
    upload: tuple[Part, ...] = SHARED,
    report: tuple[ReportField, ...] = (ReportField.EXAMPLES, ReportField.ACCURACY),
    layouts: Mapping[Part, tuple[TensorLayout, ...]] = LAYOUTS,
    method: str = "fedcg",
    federation: str = FEDERATION,
    params: Mapping[str, ParameterValue] | None = None,
    rounds: int = 2,
) -> FederationSpec:
    """Return a spec with tiny tensors that match no network, for tests without training."""
    return FederationSpec(
        federation=federation,
        classes=CLASSES,
        input=FORM,
        network=NetworkChoice(),
        method=method,
        params=dict(params or {}),
        rounds=rounds,
        seed=7,
        upload=upload,
        report=report,
        layouts=dict(layouts),
    )


def toy_parts(seed: int, parts: tuple[Part, ...] = tuple(LAYOUTS)) -> dict[Part, dict[str, Array]]:
    """Return tensors of the toy layouts."""
    random = np.random.default_rng(seed)
    return {
        part: {
            layout.name: np.array(5, dtype=np.int64)
            if layout.dtype == "int64"
            else random.standard_normal(layout.shape, dtype=np.float32)
            for layout in LAYOUTS[part]
        }
        for part in parts
    }


def toy_snapshot(images: int = 3) -> Snapshot:
    """Return a snapshot of missing files."""
    return Snapshot(tuple(SnapshotFile(f"bar/{n}.png", f"{n:064x}", 0, "train") for n in range(images)))


def toy_generation(
    spec: FederationSpec, attempt: RoundAttempt, update: bytes | None = b"update", seed: int = 1
) -> NewGeneration:
    """Return the commit of a round of the toy spec."""
    slots = {"personal": toy_parts(seed), "best": toy_parts(seed, (Part.EXTRACTOR, Part.CLASSIFIER))}
    return NewGeneration(attempt, spec.digest, slots, toy_snapshot(), {"best.val": 0.5, "best.round": 1.0}, update)


def newest(generations: Generations) -> tuple[Generation, tuple[str, ...]]:
    """Return the valid generation, which must exist, and the problems found before it."""
    generation, problems = generations.current()
    assert generation is not None
    return generation, problems


def header_of(spec: FederationSpec, at: RoundAttempt, **more: Any) -> ArtifactHeader:
    """The header of an artifact of a round attempt."""
    return ArtifactHeader(method=spec.method, federation=spec.federation, round=at.round, attempt=at.attempt, **more)


def aggregate_of(parts: Mapping[Part, Mapping[str, Array]], spec: FederationSpec, round_number: int) -> bytes:
    """A packed aggregate."""
    header = header_of(spec, RoundAttempt(round_number, 1), kind="aggregate", client=COORDINATOR)
    return pack(header, parts, spec.aggregate_codec)


def update_of(spec: FederationSpec, attempt: RoundAttempt) -> bytes:
    """Return the fake trainer's packed update of a round attempt."""
    report = Report(examples=3, accuracy=0.5)
    header = header_of(spec, attempt, kind="update", client=DEVICE, report=report)
    return pack(header, toy_parts(attempt.round, SHARED))


def draw_images(root: Path, per_class: int, seed: int) -> None:
    """Folders of noisy 32x32 drawings, one folder per class."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:32, 0:32]
    distance = np.hypot(rows - 16, columns - 16)
    shapes = (np.abs(columns - 16) < 3, distance < 7, np.abs(distance - 10) < 2)
    for label, name in enumerate(CLASSES):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            pixels = 150.0 * shapes[label] + random.normal(50, 30, size=(32, 32))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{seed}-{index:03d}.png")


def make_config(
    root: Path, *, policy: PolicySection | None = None, shadow: int = 0, export: bool = False
) -> AgentConfig:
    """Return a device's configuration with everything under `root`."""
    reproducible = VOLUNTARY_REPORT - {ReportField.COST}
    return AgentConfig(
        federation=FEDERATION,
        device=DEVICE,
        store=root / "store",
        broker=BrokerSection(host="127.0.0.1", insecure=True),
        data=DataSection(root=root / "data"),
        policy=policy or PolicySection(allow_report=DEFAULT_ALLOW_REPORT | (reproducible if shadow else set())),
        training=TrainingSection(shadow_every=shadow, device="cpu", threads=1),
        export=ExportSection(enabled=export, variants=False),
    )


def write_device(folder: Path, device: str = DEVICE, port: int = 1) -> Path:
    """Make a device's folder with its keys and an agent.toml for a broker without TLS; return the agent.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    SigningKey.generate().save(folder / "signing.key")
    (folder / "coordinator.pub").write_text(SigningKey.generate().public.hex)
    (folder / "agent.toml").write_text(
        f'federation = "{FEDERATION}"\ndevice = "{device}"\n[broker]\nhost = "127.0.0.1"\nport = {port}\ninsecure = true\n'
        '[data]\nroot = "data"\n[training]\ndevice = "cpu"\nthreads = 1\n'
    )
    return folder / "agent.toml"


class FakeTrainer:
    """A training process without torch: commits toy generations when the test allows it."""

    def __init__(self, store: PrivateStore, spec: FederationSpec, deliver: Callable[[TrainerReport], None]) -> None:
        self.store = store
        self.spec = spec
        self.deliver = deliver
        self.starts = 0
        self.commands: list[signals.TrainerCommand] = []
        self.is_automatic = True

    def start(self) -> int:
        self.starts += 1
        self.deliver(signals.TrainerReady())
        return 1000 + self.starts

    def send(self, command: signals.TrainerCommand) -> None:
        self.commands.append(command)
        if self.is_automatic:
            self.work(command)

    def work(self, command: signals.TrainerCommand) -> None:
        if isinstance(command, signals.ReleaseTrainer):
            self.deliver(Exited(1000 + self.starts, 0))
            return
        if isinstance(command, signals.ChooseModel):
            self.store.save_record(FINALISED_FILE, {"aggregate": command.aggregate})
            self.deliver(signals.Chosen(command.aggregate, succeeded=True))
            return
        if isinstance(command, signals.WeighRound):
            self.deliver(signals.Weighed(command.round_attempt, 7))
            return
        self.commit(command)
        self.deliver(signals.RoundCommitted(command.round_attempt))

    def commit(self, command: signals.TrainRound) -> None:
        update = update_of(self.spec, command.round_attempt)
        self.store.generations.commit(
            toy_generation(self.spec, command.round_attempt, update, seed=command.round_attempt.round)
        )

    def stop(self) -> None:
        """Nothing runs."""

    def rounds(self) -> list[RoundAttempt]:
        return [command.round_attempt for command in self.commands if isinstance(command, signals.TrainRound)]


MakeWorld = Callable[..., "World"]
"""Makes a world with given fields, which ends with the test (fixture `make_world`)."""


@dataclass
class World:
    """One agent in a thread, a scripted coordinator, and the broker between them."""

    root: Path
    spec: FederationSpec = field(default_factory=toy_spec)
    policy: PolicySection = field(default_factory=PolicySection)
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    device_key: SigningKey = field(default_factory=SigningKey.generate)
    is_automatic: bool = True
    clock_speed: float = 1.0
    exit_code: int | None = None

    def __post_init__(self) -> None:
        self.coordinator = ScriptedCoordinator(FEDERATION, DEVICE, self.broker, SigningKey.generate(), self.device_key)
        self.enrolled_key = self.coordinator.key.public
        self.config = make_config(self.root, policy=self.policy)
        self.trainers: list[FakeTrainer] = []
        self._thread: threading.Thread | None = None

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def start_agent(self, *, until_finished: bool = False) -> Agent:
        store = PrivateStore.open(self.config.store, FEDERATION, DEVICE)
        self.store = store
        keys = AgentKeys(self.device_key, self.enrolled_key)
        transport = MemoryTransport(self.broker, DEVICE, offline_will(FEDERATION, DEVICE, self.device_key))

        def make_trainer(deliver: Callable[[TrainerReport], None]) -> FakeTrainer:
            trainer = FakeTrainer(store, self.spec, deliver)
            trainer.is_automatic = self.is_automatic
            self.trainers.append(trainer)
            return trainer

        events = EventLog(self.config.store / "events.jsonl", time.time)
        clock = lambda: time.monotonic() * self.clock_speed  # noqa: E731
        agent = Agent(self.config, store, keys, transport, make_trainer, events, clock)
        self.agent = agent
        self.exit_code = None

        def run() -> None:
            self.exit_code = agent.run(until_finished=until_finished)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return agent

    def connect(self, *, until_finished: bool = False) -> None:
        """Start coordinator and agent, until the device's hello."""
        self.coordinator.come_online()
        self.start_agent(until_finished=until_finished)
        self.coordinator.wait(Hello)

    def aggregate(self, number: int = 0) -> bytes:
        """Return the aggregate of a round; 0: the initial one."""
        return aggregate_of(toy_parts(50 + number, SHARED), self.spec, number)

    def open_round(self, number: int = 1, attempt: int = 1) -> None:
        """Offer a round, and invite the device to it."""
        self.coordinator.offer(self.spec, self.aggregate(number - 1), number, attempt)
        self.coordinator.invite(number, attempt)

    def deliver(self) -> bytes:
        """Fetch the update that the device announces next, and send its receipt, which the device records."""
        known, manifest = len(self.events("receipt")), self.coordinator.wait(Manifest)
        update = self.coordinator.collect(manifest)
        self.coordinator.receipt(manifest)
        wait_until(lambda: len(self.events("receipt")) > known, "the receipt is recorded")
        return update

    def start_training(self) -> None:
        """Open round 1 until its training has started; the training process continues when the test allows it."""
        self.open_round()
        self.coordinator.work_until(lambda: bool(self.trainer.rounds()), "training starts")

    def stop_agent(self) -> None:
        self.agent.stop()
        self.join()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive(), "the agent did not end"

    def close(self) -> None:
        self.stop_agent()
        self.coordinator.close()

    def events(self, name: str) -> list[dict[str, EventValue]]:
        return [event for event in read_events(self.config.store / "events.jsonl") if event["event"] == name]


def connected(make_world: MakeWorld, **changes: object) -> World:
    """A device whose hello has arrived."""
    world = make_world(**changes)
    world.connect()
    return world


def in_round(make_world: MakeWorld, **changes: object) -> World:
    """A connected device that is invited to round 1."""
    world = connected(make_world, **changes)
    world.open_round()
    return world


def in_training(make_world: MakeWorld, **changes: object) -> World:
    """A device in round 1 whose training process waits until the test lets it continue."""
    world = connected(make_world, is_automatic=False, **changes)
    world.start_training()
    return world
