"""A broker that drops, delays, repeats, alters and injects messages between a real coordinator and real agents in one process.

`Federation` runs whole small federations over it. Nothing is trained, but every update depends on its device, round and base,
and every aggregate on exactly the merged updates: two runs with the same participants end with the same bytes.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.aggregation.jobs import OpenedSum, Updates
from coordinator.updates.robustness import Distances
from edge_client.agent.loop import Agent
from edge_client.config import AgentConfig, BrokerSection, DataSection, ExportSection
from edge_client.identity.credentials import AgentKeys
from edge_client.link.coordinator_link import offline_will
from edge_client.session.signals import TrainRound
from edge_client.store.private_store import PrivateStore
from edge_client.training.trainer_handle import TrainerReport
from fedcg.event_log import EventLog, EventValue, read_events
from fedcg.wire.artifacts.artifacts import pack
from fedcg.wire.messages.envelopes import OVERHEAD_BYTES, SigningKey
from fedcg.wire.messages.schemas import AnyMessage, RoundAttempt, decode
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transfer.chunks import chunk_frame, parse_chunk
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.coordinator import toy_artifacts
from tests.support.coordinator.world import PlainWorker, RunningService, World
from tests.support.edge.world import FakeTrainer, toy_generation
from tests.support.waiting import wait_until

TOPICS = Topics(toy_artifacts.FEDERATION)
CHUNKS = (TopicKind.AGGREGATE, TopicKind.UP_CHUNK, TopicKind.DOWN_CHUNK)


@dataclass(frozen=True)
class Passing:
    """One publish on its way through the broker; delivered `after_s` seconds late."""

    identity: str
    topic: str
    payload: bytes
    retain: bool = False
    after_s: float = 0.0

    @property
    def is_chunk(self) -> bool:
        parsed = TOPICS.parse(self.topic)
        return parsed is not None and parsed.kind in CHUNKS

    @property
    def message(self) -> AnyMessage:
        """Return the content of a control message."""
        return decode(self.payload[OVERHEAD_BYTES:])


Behaviour = Callable[["HostileBroker", Passing], Iterable[Passing]]


def honest(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
    return [passing]


class HostileBroker(MemoryBroker):
    """Delivers its behaviour's version of each publish, to any recipient; keeps all of them."""

    def __init__(self, behaviour: Behaviour = honest, seed: int = 1) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.rng = random.Random(seed)
        self.seen: list[Passing] = []
        self.did: Counter[str] = Counter()
        self._timers: list[threading.Timer] = []

    def route(self, identity: str, topic: str, payload: bytes, *, retain: bool) -> bool:
        with self._lock:
            passing = Passing(identity, topic, payload, retain)
            instead = list(self.behaviour(self, passing))
            self.seen.append(passing)
        for item in instead:
            self.deliver(item)
        return True

    def deliver(self, passing: Passing) -> None:
        """Deliver this publish or another."""
        if passing.after_s:
            timer = threading.Timer(passing.after_s, self._pass, (passing,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        else:
            self._pass(passing)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _pass(self, passing: Passing) -> None:
        super().route(passing.identity, passing.topic, passing.payload, retain=passing.retain)


def alter(passing: Passing, rng: random.Random) -> bytes:
    """Return other bytes of the same length; a chunk is framed again, so that only the sha256 of the whole can detect it."""
    if passing.is_chunk:
        chunk = parse_chunk(passing.payload)
        return chunk_frame(chunk.artifact, chunk.index, bytes([chunk.data[0] ^ 1]) + chunk.data[1:])
    position = rng.randrange(len(passing.payload))
    return passing.payload[:position] + bytes([passing.payload[position] ^ 0x10]) + passing.payload[position + 1 :]


class DigestWorker(PlainWorker):
    """Merges without torch, into a result that depends on every update."""

    def finish(self, updates: Updates, limits: Distances, opened: OpenedSum = OpenedSum()) -> None:
        self.merged = updates
        super().finish(updates, limits)

    def merge(self, spec: object, round_number: int, attempt: int) -> bytes:
        digest = hashlib.sha256(repr(self.merged).encode()).digest()
        return toy_artifacts.aggregate_bytes(spec, round_number, attempt, seed=int.from_bytes(digest, "big"))  # type: ignore[arg-type]


class DrawingTrainer(FakeTrainer):
    """Commits an update that depends on device, round and base; records every requested round."""

    device = ""
    images = ""  # distinguishes a device's copy with other images from the device

    def commit(self, command: TrainRound) -> None:
        round_attempt = command.round_attempt
        header = toy_artifacts.update_header(
            self.spec, round_attempt.round, round_attempt.attempt, self.device, command.aggregate
        )
        seed = hashlib.sha256(f"{self.device}{self.images} {round_attempt.round} {command.aggregate}".encode()).digest()
        parts = toy_artifacts.random_parts(toy_artifacts.shared_layouts(self.spec), int.from_bytes(seed, "big"))
        self.store.generations.commit(toy_generation(self.spec, round_attempt, pack(header, parts, self.spec.codec)))


@dataclass
class Box:
    """One real agent in its own thread, with its private store."""

    name: str
    root: Path
    key: SigningKey = field(default_factory=SigningKey.generate)
    images: str = ""
    exit_code: int | None = None

    def start(self, federation: Federation) -> None:
        config = AgentConfig(
            federation=toy_artifacts.FEDERATION,
            device=self.name,
            store=self.root / "store",
            broker=BrokerSection(host="127.0.0.1", insecure=True, chunk_bytes=1024),
            data=DataSection(root=self.root),
            export=ExportSection(enabled=False),
        )
        store = PrivateStore.open(config.store, toy_artifacts.FEDERATION, self.name)
        transport = MemoryTransport(
            federation.broker, self.name, offline_will(toy_artifacts.FEDERATION, self.name, self.key)
        )

        def make_trainer(deliver: Callable[[TrainerReport], None]) -> FakeTrainer:
            self.trainer = DrawingTrainer(store, federation.world.spec, deliver)
            self.trainer.device, self.trainer.images = self.name, self.images
            return self.trainer

        events = EventLog(config.store / "events.jsonl", time.time)
        keys = AgentKeys(self.key, federation.world.key.public)
        speed = federation.clock_speed
        agent = Agent(config, store, keys, transport, make_trainer, events, lambda: time.monotonic() * speed)
        self.config, self.agent, self.exit_code = config, agent, None

        def run() -> None:
            self.exit_code = agent.run(until_finished=True)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(15.0)
        assert not self._thread.is_alive(), f"{self.name} did not end"

    def events(self, name: str) -> list[dict[str, EventValue]]:
        return [event for event in read_events(self.root / "store" / "events.jsonl") if event["event"] == name]

    def refused(self) -> set[str]:
        """Return the reasons of the agent's refusals so far."""
        return {str(event["reason"]) for event in self.events("refused")}


class Federation:
    """The real coordinator and real agents around a hostile broker."""

    def __init__(
        self,
        root: Path,
        behaviour: Behaviour = honest,
        *,
        devices: tuple[str, ...] = ("a", "b"),
        rounds: int = 2,
        deadline_s: float = 600.0,
        seed: int = 1,
        clock_speed: float = 4.0,
    ) -> None:
        spec = toy_artifacts.tiny_spec(rounds=rounds)
        self.broker = HostileBroker(behaviour, seed)
        self.clock_speed = clock_speed
        self.world = World(
            root / "home",
            spec,
            toy_artifacts.aggregate_bytes(spec, 0, 0, seed=1),
            clients=(),
            min_clients=len(devices),
            make_worker=DigestWorker,
            deadline_s=deadline_s,
        )
        self.world.broker = self.broker
        self.boxes = {name: Box(name, root / name) for name in devices}
        for box in self.boxes.values():
            box.root.mkdir(parents=True)
            self.world.store.add_device(box.name, box.key.public.hex, 1.0)

    def run(self, deadline_s: float = 150.0) -> Federation:
        """Run from the first hello to the last agent's end, or to a pause with its reason."""
        with RunningService(self.world) as running:
            self.service = running.service
            self.start_boxes()
            wait_until(self.is_over, f"the end; so far {self.world.events()[-6:]}", deadline_s)
            self.refusals = self.service.refusals
        return self

    def start_boxes(self) -> None:
        for box in self.boxes.values():
            box.start(self)

    def is_over(self) -> bool:
        return all(box.exit_code is not None for box in self.boxes.values()) or bool(self.world.events("stalled"))

    def close(self) -> None:
        self.broker.behaviour = honest
        self.broker.close()
        for box in self.boxes.values():
            if hasattr(box, "agent"):
                box.stop()
        self.world.close()

    @property
    def final(self) -> str:
        """Return the sha256 of the final aggregate."""
        return str(self.world.events("finished")[-1]["aggregate"])

    def assert_nothing_counted_or_trained_twice(self) -> None:
        """Check for one accepted update per device and attempt, one receipt per update, and no round trained again after its commit."""
        for box in self.boxes.values():
            trained = [(round_attempt.round, round_attempt.attempt) for round_attempt in box.trainer.rounds()]
            assert len(trained) == len(set(trained)), f"{box.name} trained {trained}"
            ended = [event["artifact"] for event in box.events("receipt")]
            assert len(ended) == len(set(ended)), f"{box.name} had receipts for {ended}"
        stored = [(event["client"], event["round"], event["attempt"]) for event in self.world.events("update_stored")]
        assert len(stored) == len(set(stored)), stored
        for opened in self.world.events("attempt_opened"):
            key = (toy_artifacts.FEDERATION, RoundAttempt(opened["round"], opened["attempt"]))
            clients = [update.client for update in self.world.store.updates(*key)]
            assert len(clients) == len(set(clients)), clients

    def assert_completed(self) -> None:
        """Check that every round was closed at its first attempt, with an update of every device."""
        rounds = self.world.spec.rounds
        assert [(e["round"], e["attempt"]) for e in self.world.events("attempt_opened")] == [
            (number + 1, 1) for number in range(rounds)
        ]
        assert len(self.world.events("update_stored")) == rounds * len(self.boxes)
        assert {box.exit_code for box in self.boxes.values()} == {0}
        self.assert_nothing_counted_or_trained_twice()
