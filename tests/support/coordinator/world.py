"""What the coordinator's tests share: tiny specs and updates, a scripted device, a worker without torch, a running service."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from coordinator.aggregation.worker_messages import (
    Job,
    JobDone,
    UpdateAdded,
    Updates,
    WorkerEvent,
    WorkerReady,
    WorkerSettings,
)
from coordinator.config import RoundSettings
from coordinator.http.app import Beside
from coordinator.pki.signing_keys import SigningIdentity
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.service.service import Service
from coordinator.service.service_context import MakeWorker, ServiceContext
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.artifacts.artifact_store import ArtifactStore, Remote
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, pack, unpack
from fedcg.wire.artifacts.tensors import Array
from fedcg.wire.messages.messages import (
    COORDINATOR,
    Accept,
    AnyMessage,
    ArtifactRef,
    Carrier,
    Decline,
    DeclineReason,
    DeviceStatus,
    Finished,
    Hello,
    Invite,
    Manifest,
    Need,
    Offer,
    Receipt,
    Welcome,
)
from fedcg.wire.messages.ordering import Session, session_id
from fedcg.wire.messages.signing import SigningKey, open_envelope, seal
from fedcg.wire.messages.topics import Topics
from fedcg.wire.parts import Part, PartLayouts, Report, ReportField, TensorLayout
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transport.memory import MemoryBroker, MemoryTransport
from fedcg.wire.transport.transport import Delivery, Will
from fedcg.wire.versions import SPOKEN
from tests.support.edge.receivers import Receiver
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for, make_ref

FEDERATION = "tiny"
DEADLINE_S = 30.0
REPEAT_S = 1.0
LAYOUTS: dict[Part, tuple[TensorLayout, ...]] = {
    Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(40, 50)),),
    Part.GENERATOR: (
        TensorLayout(name="count", dtype="int64", shape=()),
        TensorLayout(name="weight", dtype="float32", shape=(3, 4)),
    ),
    Part.EXTRACTOR: (TensorLayout(name="weight", dtype="float32", shape=(7,)),),
}


def tiny_spec(rounds: int = 2) -> FederationSpec:
    return FederationSpec(
        federation=FEDERATION,
        classes=("x", "y", "z"),
        image=ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,)),
        network=NetworkChoice(),
        method="fedcg",
        params={"server_iterations": 4},
        rounds=rounds,
        seed=1,
        upload=(Part.CLASSIFIER, Part.GENERATOR),
        report=(ReportField.EXAMPLES, ReportField.ACCURACY),
        layouts=LAYOUTS,
    )


def shared_layouts(spec: FederationSpec) -> PartLayouts:
    return {part: spec.layouts[part] for part in spec.upload}


def random_parts(layouts: PartLayouts, seed: int, scale: float = 0.1) -> dict[Part, dict[str, Array]]:
    """Deterministic small weights; buffers of integers stay 0, "var" buffers positive."""
    generator = np.random.default_rng(seed)
    return {
        part: {
            layout.name: np.zeros(layout.shape, np.int64)
            if layout.dtype == "int64"
            else np.abs(generator.normal(0, scale, layout.shape)).astype(np.float32)
            for layout in tensors
        }
        for part, tensors in layouts.items()
    }


def update_header(
    spec: FederationSpec, round_number: int, attempt: int, client: str, base: str, **changes: Any
) -> ArtifactHeader:
    values: dict[str, Any] = {
        "kind": "update",
        "method": spec.method,
        "federation": spec.federation,
        "round": round_number,
        "attempt": attempt,
        "client": client,
        "base": base,
        "report": Report(examples=10 + len(client), accuracy=0.5),
    }
    return ArtifactHeader(**{**values, **changes})


def aggregate_bytes(spec: FederationSpec, round_number: int, attempt: int, seed: int) -> bytes:
    header = ArtifactHeader(
        kind="aggregate",
        method=spec.method,
        federation=spec.federation,
        round=round_number,
        attempt=attempt,
        client=COORDINATOR,
    )
    return pack(header, random_parts(shared_layouts(spec), seed))


class PlainWorker:
    """Merges without torch and at once: the aggregate depends on the round only. Remembers what it was asked."""

    def __init__(self, settings: WorkerSettings, notify: Callable[[Any], None]) -> None:
        self.asked: list[object] = []
        self._store = ArtifactStore(settings.artifacts)
        self._notify = notify
        self._job: Job | None = None

    def start(self) -> None:
        self._notify(WorkerReady(0, 1, "cpu"))

    def open(self, job: Job) -> None:
        self.asked.append(("open", job.round, job.attempt))
        self._job = job

    def add(self, client: str, artifact: str) -> None:
        assert self._job is not None
        self.asked.append(("add", client, artifact))
        self._notify(UpdateAdded(self._job.round, self._job.attempt, client))

    def finish(self, updates: Updates, limits: Distances) -> None:
        assert self._job is not None
        self.asked.append(("finish", updates))
        spec = FederationSpec.parse(self._store.get(self._job.spec))
        merged = self.merge(spec, self._job.round, self._job.attempt)
        done = JobDone(
            self._job.round, self._job.attempt, self._store.put(merged), len(merged), self._store.put(b"state")
        )
        self._notify(done)

    def merge(self, spec: FederationSpec, round_number: int, attempt: int) -> bytes:
        return aggregate_bytes(spec, round_number, attempt, seed=100 + round_number)

    def follow(self, reply: Any) -> tuple[WorkerEvent, ...]:
        return (reply,)

    def tick(self) -> None:
        pass

    def stop(self) -> None:
        self.asked.append("stop")


@dataclass
class FakeDevice:
    """A scripted device: takes part in everything, unless told otherwise. Works on its transport's thread."""

    name: str
    broker: MemoryBroker
    spec: FederationSpec
    coordinator: SigningKey
    key: SigningKey = field(default_factory=SigningKey.generate)
    scale: float = 0.05
    silent: bool = False
    carrier: Carrier = Carrier.MQTT  # over HTTPS the test puts what is granted
    decline: DeclineReason | None = None
    received: list[AnyMessage] = field(default_factory=list)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    asked_for: list[tuple[int, int]] = field(default_factory=list)
    heard_on: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.topics = Topics(self.spec.federation)
        self.session: Session | None = None
        self.nonces = 0
        self.offer: Offer | Finished | None = None
        self.receivers: dict[str, Receiver] = {}
        self.pending: tuple[Manifest, bytes] | None = None
        self.sent_at = 0.0
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self.trained: set[tuple[int, int]] = set()

    def start(self) -> FakeDevice:
        will = Will(self.topics.status(self.name), seal(self._status(online=False), self.key))
        self.transport = MemoryTransport(self.broker, self.name, will)
        for topic in (
            self.topics.offer,
            self.topics.coordinator,
            self.topics.aggregate,
            self.topics.down_control(self.name),
            self.topics.down_chunk(self.name),
        ):
            self.transport.subscribe(topic)
        self.transport.start(self._delivered, self._link)
        threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def stop(self) -> None:
        self.stopped.set()
        self.transport.close()

    def act(self) -> None:
        """Do what can be done now, as after a message."""
        with self.lock:
            self._train()

    def _repeat(self) -> None:
        """What was not answered is sent again, as a real device does."""
        while not self.stopped.wait(REPEAT_S):
            with self.lock:
                if self.session is None or not self.broker.is_attached(self.transport):
                    continue
                for artifact in list(self.receivers):
                    self._ask(artifact)
                if self.pending is not None and time.monotonic() - self.sent_at >= REPEAT_S:
                    self.sent_at = time.monotonic()
                    self.tell(self.pending[0])

    def receipts(self) -> list[Receipt]:
        return [message for message in list(self.received) if isinstance(message, Receipt)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in list(self.received) if isinstance(message, kind)]

    def hello(self) -> None:
        self.nonces += 1
        self.nonce = f"{self.nonces:032x}"
        self.session = None
        hello = Hello(**self._addressed(), nonce=self.nonce, versions=SPOKEN, agent="fake-1", carrier=self.carrier)
        self.transport.publish(self.topics.up_control(self.name), seal(hello, self.key))

    def tell(self, message: AnyMessage) -> None:
        assert self.session is not None
        self.transport.publish(self.topics.up_control(self.name), seal(self.session.stamp(message), self.key))

    def send_update(self, round_number: int, attempt: int, data: bytes) -> Manifest:
        self.pending = (
            Manifest(**self._addressed(round_number, attempt), artifact=make_ref(data, 1024)),
            data,
        )
        self.sent_at = time.monotonic()
        self.tell(self.pending[0])
        return self.pending[0]

    def make_update(self, round_number: int, attempt: int, base: str, **changes: Any) -> bytes:
        layouts = shared_layouts(self.spec)
        parts = random_parts(layouts, seed=1000 * round_number + sum(self.name.encode()), scale=self.scale)
        header = update_header(self.spec, round_number, attempt, self.name, base, **changes)
        return pack(header, parts, self.spec.codec, self._base(base))

    def _base(self, artifact: str) -> Base | None:
        """What a delta codec's updates are taken to."""
        if not self.spec.with_base:
            return None
        decoded = unpack(self.artifacts[artifact], shared_layouts(self.spec)).parts
        return Base(artifact, {part: decoded[part] for part in self.spec.with_base})

    def _addressed(self, round_number: int = 0, attempt: int = 0) -> dict[str, Any]:
        return {
            "federation": self.spec.federation,
            "sender": self.name,
            "recipient": COORDINATOR,
            "round": round_number,
            "attempt": attempt,
        }

    def _status(self, *, online: bool) -> DeviceStatus:
        return DeviceStatus(**self._addressed(), online=online)

    def _link(self, up: bool) -> None:
        if up:
            self.transport.publish(
                self.topics.status(self.name), seal(self._status(online=True), self.key), retain=True
            )
            self.hello()

    def _delivered(self, delivery: Delivery) -> None:
        with self.lock:
            self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        self.heard_on.add(delivery.topic)
        if delivery.topic in (self.topics.aggregate, self.topics.down_chunk(self.name)):
            self._chunk(delivery.payload)
            return
        message = open_envelope(
            delivery.payload, lambda sender: self.coordinator.public if sender == COORDINATOR else None
        )
        self.received.append(message)
        if isinstance(message, Welcome):
            if self.session is None and message.device_nonce == self.nonce:
                self.session = Session(session_id(self.nonce, message.nonce))
                if self.pending is not None:
                    self.tell(self.pending[0])
        elif isinstance(message, Offer | Finished):
            self.offer = message
            self._want(message.aggregate)
        elif isinstance(message, Invite | Need | Receipt) and self.session is not None:  # else of an earlier session
            self.session.admit(message)
            self._in_session(message)

    def _in_session(self, message: Invite | Need | Receipt) -> None:
        if isinstance(message, Invite):
            position = self._addressed(message.round, message.attempt)
            if self.decline is not None:
                self.tell(Decline(**position, reason=self.decline))
            else:
                self.tell(Accept(**position))
                self._train()
        elif isinstance(message, Need) and self.pending is not None:
            self.asked_for += message.ranges
            for frame in (
                ()
                if self.carrier is Carrier.HTTPS
                else frames_for(self.pending[1], self.pending[0].artifact, message.ranges)
            ):
                self.transport.publish(self.topics.up_chunk(self.name), frame)
        elif isinstance(message, Receipt):
            self.pending = None

    def _want(self, ref: ArtifactRef) -> None:
        if ref.id not in self.artifacts:
            self.receivers.setdefault(ref.id, Receiver(ref))
            self._ask(ref.id)

    def _ask(self, artifact: str) -> None:
        ranges = self.receivers[artifact].next_need(time.monotonic())
        if ranges is not None and self.session is not None:
            self.tell(Need(**self._addressed(), artifact=artifact, ranges=ranges))

    def _chunk(self, payload: bytes) -> None:
        chunk = parse_chunk(payload)
        receiver = self.receivers.get(chunk.artifact)
        if receiver is None:
            return
        receiver.feed(chunk, time.monotonic())
        if receiver.complete:
            del self.receivers[chunk.artifact]
            self.artifacts[chunk.artifact] = receiver.data()
            self._train()
        else:
            self._ask(chunk.artifact)

    def _train(self) -> None:
        """Answer the open offer once invited and once its aggregate is here; a stand-in for training."""
        offer = self.offer
        if not isinstance(offer, Offer) or self.session is None or self.silent or self.decline is not None:
            return
        position = (offer.round, offer.attempt)
        invited = any((invite.round, invite.attempt) == position for invite in self.of(Invite))
        if position in self.trained or not invited or offer.aggregate.id not in self.artifacts:
            return
        unpack(self.artifacts[offer.aggregate.id], shared_layouts(self.spec))
        self.trained.add(position)
        self.send_update(*position, self.make_update(*position, offer.aggregate.id))


@dataclass
class World:
    """A coordinator's directory without certificates, on a broker in memory, with devices; and its running service."""

    root: Path
    spec: FederationSpec
    base: bytes
    server_state: bytes = b"state"
    clients: tuple[str, ...] = ("a", "b")
    make_worker: MakeWorker | None = None
    min_clients: int = 2
    max_attempts: int = 3
    deadline_s: float = 600.0
    public_data: Path | None = None
    keep_rounds: int = 10
    rounds: RoundSettings = field(default_factory=lambda: RoundSettings(gather_s=0.0, retry_s=0.0))
    remote: Remote | None = None

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(self._rules)
        self.key = SigningKey.generate()
        self.signing_identity = SigningIdentity(self.key)
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.root / "database.sqlite")
        self.artifacts = ArtifactStore(self.root / "artifacts", self.remote)
        self.base_id = self.artifacts.put(self.base)
        federation = FederationRecord(
            self.spec.federation,
            self.spec.method,
            self.artifacts.put(self.spec.canonical()),
            self.spec.rounds,
            self.min_clients,
            self.max_attempts,
            self.deadline_s,
            1,
            1.0,
        )
        initial = AggregateRecord(
            self.spec.federation, 0, 0, self.base_id, len(self.base), self.artifacts.put(self.server_state), 1.0
        )
        self.store.add_federation(federation, initial)
        self.workers: list[Any] = []
        self.devices = {name: FakeDevice(name, self.broker, self.spec, self.key) for name in self.clients}
        for device in self.devices.values():
            self.store.add_device(device.name, device.key.public.hex, 1.0)

    def service_context(self) -> ServiceContext:
        def make_worker(settings: WorkerSettings, notify: Callable[[Any], None]) -> Any:
            self.workers.append((self.make_worker or PlainWorker)(settings, notify))
            return self.workers[-1]

        return ServiceContext(
            federation=self.store.federation(self.spec.federation),
            spec=self.spec,
            store=self.store,
            artifacts=self.artifacts,
            connect=lambda will: MemoryTransport(self.broker, COORDINATOR, will),
            signing_identity=lambda: self.signing_identity,
            worker=WorkerSettings(1, "cpu", b"s" * 32, self.root / "artifacts", self.root / "spill", self.public_data),
            events=EventLog(self.root / "events.jsonl", time.time),
            make_worker=make_worker,
            keep_rounds=self.keep_rounds,
            rounds=self.rounds,
        )

    def start_devices(self) -> None:
        for device in self.devices.values():
            device.start()

    def close(self) -> None:
        for device in self.devices.values():
            if hasattr(device, "transport"):
                device.stop()
        self.store.close()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        path = self.root / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if not name or event["event"] == name]

    def wait_event(self, name: str, count: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.events(name)) >= count, f"{name} x{count}; so far {self.events()[-8:]}")
        return self.events(name)[count - 1]

    def _rules(self, identity: str, action: str, topic: str) -> bool:
        topics = Topics(self.spec.federation)
        return topics.may_publish(identity, topic) if action == "publish" else topics.may_read(identity, topic)


class RunningService:
    """A service on an event loop of its own thread."""

    def __init__(self, world: World, beside: Beside = lambda service: nullcontext()) -> None:
        self._world = world
        self._beside = beside
        self._failure: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        self._reraise()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._reraise()

    @property
    def service(self) -> Service:
        return self._service

    def stop(self) -> None:
        if self._thread.is_alive():
            self._service.stop()
            self._thread.join(DEADLINE_S)

    def vanish(self) -> None:
        """Go without a word: the link drops with the will, nothing is flushed, nobody is told."""
        self._world.broker.drop(COORDINATOR)
        self.stop()

    def _reraise(self) -> None:
        if self._failure is not None:
            raise AssertionError("the service failed") from self._failure

    async def _main(self) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "service")
        try:
            self._service = await loop.run_in_executor(thread, Service, self._world.service_context())
            try:
                await loop.run_in_executor(thread, self._service.start)
                async with self._beside(self._service):
                    self._up.set()
                    await loop.run_in_executor(thread, self._service.run)
            finally:
                await loop.run_in_executor(thread, self._service.close)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            self._failure = error
        finally:
            self._up.set()
