"""Both ends of a transfer for `fedcg bench transport`: devices without training, a coordinator without rounds or learning.

Everything that a transfer costs is the product's own: envelopes, sessions, chunk frames, journal, sha256, fsync, receipts.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.messaging.cohort_marks import Cohorts
from coordinator.messaging.event_queue import Inbox
from coordinator.messaging.message_checks import Ingest, Sessions
from coordinator.messaging.publisher import Publisher
from coordinator.pki.signing_keys import SigningIdentity
from coordinator.updates.receipts import CHECKS
from coordinator.updates.receiver import Broken, GivenUp, Intake, IntakeEvent
from coordinator.updates.upload_windows import Grant, Received, Uploads
from fedcg.event_log import EventLog
from fedcg.refusal_counter import Refusals
from fedcg.wire.artifacts.artifacts import ArtifactStore
from fedcg.wire.messages.messages import (
    COORDINATOR,
    Accept,
    AnyMessage,
    Finished,
    Hello,
    Invite,
    Manifest,
    Need,
    Offer,
    Outcome,
    Receipt,
    Welcome,
)
from fedcg.wire.messages.ordering import Session, session_id
from fedcg.wire.messages.signing import SigningKey, VerifyKey, open_envelope, seal
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transfer.broker_presets import LinkLimits
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender, file_ref
from fedcg.wire.transfer.chunks import chunk_bytes_for, read_frame
from fedcg.wire.transfer.partial_files import DurableReceiver, Partials
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig
from fedcg.wire.transport.transport import Delivery
from fedcg.wire.versions import PROTOCOL_VERSION

HELLO_AGAIN_S = 0.5
TICK_S = 0.25
MakeUpdate = Callable[[str, int, int, str], bytes]


@dataclass(frozen=True)
class Party:
    """Who a bench process is.

    Attributes:
        mqtt: the broker, and the identity there.
        federation: its id.
        signing: file of its signing key.
        folder: where it keeps artifacts.
        limits: how the link is used.
    """

    mqtt: MqttConfig
    federation: str
    signing: Path
    folder: Path
    limits: LinkLimits


class BenchDevice:
    """One session: takes part in every round at once, or sends files one after the other.

    Args:
        party: who it is.
        coordinator: the coordinator's public key.
        inbox: gets (this device, what the transport brought).
        make_update: the update of (device, round, attempt, base) in rounds.
    """

    def __init__(
        self,
        party: Party,
        coordinator: VerifyKey,
        inbox: queue.SimpleQueue[tuple[BenchDevice, Delivery | bool]],
        make_update: MakeUpdate | None = None,
    ) -> None:
        self.name = party.mqtt.identity
        self.receipts: list[Outcome] = []
        self.is_invited = False
        self._party = party
        self._coordinator = coordinator
        self._make_update = make_update
        self._key = SigningKey.load(party.signing)
        self._topics = Topics(party.federation)
        self._transport = MqttTransport(party.mqtt)
        self._sender = ChunkSender(self._transport, f"chunks-{self.name}", at_once=True)
        self._store = ArtifactStore(party.folder)
        self._partials = Partials(party.folder / ".partial", 4, 1 << 40)
        self._session: Session | None = None
        self._grant = 0
        self._nonce = ""
        self._hello_at = 0.0
        self._update: ChunkFile | None = None
        self._download: DurableReceiver | None = None
        self._offer: Offer | None = None
        self._invited: set[tuple[int, int]] = set()
        self._trained: set[tuple[int, int]] = set()
        self._inbox = inbox

    def start(self) -> None:
        """Connect."""
        for topic in (self._topics.down_control(self.name), self._topics.offer):
            self._transport.subscribe(topic)
        for topic in (self._topics.down_chunk(self.name), self._topics.aggregate):
            self._transport.subscribe(topic, 0)
        self._sender.start()
        self._transport.start(lambda item: self._inbox.put((self, item)), lambda up: self._inbox.put((self, up)))

    def close(self) -> None:
        """Hang up."""
        self._sender.close()
        self._transport.close()

    def announce(self, path: Path, round_number: int = 1, attempt: int = 1) -> None:
        """Send the update in a file: its sha256 first, then the manifest with the chunks that the invite granted."""
        ref = file_ref(path, chunk_bytes_for(self._transport.max_payload, self._party.limits.chunk_bytes))
        self._update = ChunkFile(path, ref)
        following = min(self._grant, ref.chunks)
        self._tell(Manifest(**self._addressed(round_number, attempt), artifact=ref, following=following))
        if following:
            self._sender.serve(self._topics.up_chunk(self.name), self._update, ((0, following),))

    def take(self, item: Delivery | bool) -> None:
        """Do what follows from a delivery or a change of the link."""
        if isinstance(item, bool):
            if item:
                self._nonce, self._session = secrets.token_hex(16), None
                self._hello(time.monotonic())
        elif item.topic in (self._topics.aggregate, self._topics.down_chunk(self.name)):
            self._take_chunk(item.payload)
        else:
            self._hear(open_envelope(item.payload, lambda _sender: self._coordinator))

    def look_after(self, now: float) -> None:
        """Say again what was not answered, and ask for what is missing."""
        if self._session is None and self._nonce and now >= self._hello_at:
            self._hello(now)
        if self._download is None or self._session is None:
            return
        ranges = self._download.next_need(now)
        if ranges is not None:
            self._tell(Need(**self._addressed(), artifact=self._download.ref.id, ranges=ranges))

    def _hello(self, now: float) -> None:
        self._hello_at = now + HELLO_AGAIN_S
        self._publish(seal(Hello(**self._addressed(), nonce=self._nonce, versions=(1,), agent="bench"), self._key))

    def _hear(self, message: AnyMessage) -> None:
        if isinstance(message, Welcome):
            self._session = Session(session_id(message.device_nonce, message.nonce))
        elif isinstance(message, Offer):
            self._offer = message
            if self._make_update is not None and not self._store.has(message.aggregate.id):
                self._download = DurableReceiver(self._partials.open(message.aggregate), self._party.limits.window)
        elif isinstance(message, Need) and self._update is not None:
            self._sender.serve(self._topics.up_chunk(self.name), self._update, message.ranges)
        elif isinstance(message, Receipt):
            self.receipts.append(message.outcome)
        elif isinstance(message, Invite):
            self.is_invited, self._grant = True, message.grant
            self._invited.add((message.round, message.attempt))
            self._tell(Accept(**self._addressed(message.round, message.attempt)))
            self._work()
        elif isinstance(message, Finished):
            self._offer = None

    def _take_chunk(self, payload: bytes) -> None:
        download = self._download
        if download is None:
            return
        download.feed(read_frame(payload), time.monotonic())
        if download.complete:
            self._store.adopt(download.finish(), download.ref.id)
            self._partials.discard(download.ref.id)
            self._download = None
            self._work()

    def _work(self) -> None:
        """A stand-in for training: the update is made at once, and kept durably like an outbox."""
        offer = self._offer
        if offer is None or self._make_update is None or not self._store.has(offer.aggregate.id):
            return
        position = (offer.round, offer.attempt)
        if position not in self._invited or position in self._trained:
            return
        self._trained.add(position)
        update = self._store.put(self._make_update(self.name, *position, offer.aggregate.id))
        self.announce(self._store.path(update), *position)

    def _addressed(self, round_number: int = 0, attempt: int = 0) -> dict[str, Any]:
        return {
            "federation": self._party.federation,
            "sender": self.name,
            "recipient": COORDINATOR,
            "round": round_number,
            "attempt": attempt,
        }

    def _tell(self, message: AnyMessage) -> None:
        if self._session is not None:
            self._publish(seal(self._session.stamp(message), self._key))

    def _publish(self, payload: bytes) -> None:
        self._transport.publish(self._topics.up_control(self.name), payload)


def run_senders(parties: tuple[Party, ...], coordinator: str, files: tuple[tuple[Path, ...], ...], pipe: Any) -> None:
    """A process of its own: each session delivers its files one after the other; tells how many seconds it took."""
    inbox: queue.SimpleQueue[tuple[BenchDevice, Delivery | bool]] = queue.SimpleQueue()
    devices = [BenchDevice(party, VerifyKey.from_hex(coordinator), inbox) for party in parties]
    waiting = {device.name: deque(own) for device, own in zip(devices, files, strict=True)}
    for device in devices:
        device.start()
    while not all(device.is_invited for device in devices):
        with contextlib.suppress(queue.Empty):
            device, item = inbox.get(timeout=0.1)
            device.take(item)
        for device in devices:
            device.look_after(time.monotonic())
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    for device in devices:
        device.announce(waiting[device.name].popleft())
    missing = sum(len(own) for own in files)
    while missing:
        device, item = inbox.get()
        before = len(device.receipts)
        device.take(item)
        missing -= len(device.receipts) - before
        if len(device.receipts) > before and waiting[device.name]:
            device.announce(waiting[device.name].popleft())
    pipe.send(time.perf_counter() - began)
    for device in devices:
        device.close()


def run_devices(parties: tuple[Party, ...], coordinator: str, make_update: MakeUpdate, pipe: Any) -> None:
    """A process of its own: sessions that take part in rounds until the other end of the pipe says something."""
    inbox: queue.SimpleQueue[tuple[BenchDevice, Delivery | bool]] = queue.SimpleQueue()
    devices = [BenchDevice(party, VerifyKey.from_hex(coordinator), inbox, make_update) for party in parties]
    for device in devices:
        device.start()
    looked_at = time.monotonic()
    while not pipe.poll():
        with contextlib.suppress(queue.Empty):
            device, item = inbox.get(timeout=0.05)
            device.take(item)
        now = time.monotonic()
        if now - looked_at > 0.05:
            looked_at = now
            for device in devices:
                device.look_after(now)
    for device in devices:
        device.close()


def run_receiver(party: Party, devices: dict[str, str], pipe: Any) -> None:
    """A process of its own: receive updates durably and send receipts, until the other end of the pipe says something."""
    asyncio.run(_receive(party, devices, pipe))


@dataclass(frozen=True)
class _Kept:
    received: Received


class BenchCoordinator:
    """Takes updates from whoever says hello: no rounds, no database, no checks of what is inside."""

    def __init__(self, party: Party, devices: dict[str, str]) -> None:
        self._topics = Topics(party.federation)
        self._sessions = Sessions()
        refusals = Refusals(EventLog(party.folder / "events.jsonl", time.time))
        self._ingest = Ingest(self._topics, self._sessions, refusals)
        self._ingest.learn_keys(devices.items())
        self._devices = len(devices)
        self._transport = MqttTransport(party.mqtt)
        signing_identity = SigningIdentity(SigningKey.load(party.signing))
        self._publisher = Publisher(
            self._transport, self._topics, signing_identity, 1, self._sessions, Cohorts(), party.limits
        )
        self._store = ArtifactStore(party.folder)
        partials = Partials(party.folder / ".partial", 1024, 1 << 40)
        self._inbox: Inbox[Delivery | Grant | GivenUp | Broken | _Kept | bool] = Inbox(asyncio.get_running_loop())
        uploads = Uploads(partials, party.limits.window, party.limits.shared)
        self._intake = Intake(uploads, partials.collect, self._heard, refusals)
        self._checks = ThreadPoolExecutor(CHECKS, "check")

    async def run(self, pipe: Any) -> None:
        """Work until the other end of the pipe says something."""
        self._intake.start()
        self._publisher.start()
        for topic in (self._topics.all_up_control(), self._topics.all_up_chunk()):
            self._transport.subscribe(topic)
        self._transport.start(self._deliver, self._inbox.put)
        ticked_at = float("-inf")
        while True:
            item = await self._inbox.get(TICK_S)
            if item is True:
                pipe.send("ready")
            elif isinstance(item, Delivery):
                self._hear(item)
            elif isinstance(item, _Kept):
                self._answer(item.received)
            elif isinstance(item, GivenUp | Broken):
                raise item.error
            elif isinstance(item, Grant):
                self._publisher.need(item.device, item.manifest, item.ranges)
            if time.monotonic() - ticked_at >= TICK_S:
                ticked_at = time.monotonic()
                self._intake.tick()
                if pipe.poll():
                    break
        self._checks.shutdown()
        self._intake.close()
        self._publisher.close()
        self._transport.close()

    def _deliver(self, delivery: Delivery) -> None:
        device, kind = self._ingest.origin(delivery)
        if kind is TopicKind.UP_CHUNK:
            self._intake.frame(device, delivery.payload)
        else:
            self._inbox.put(delivery, len(delivery.payload), device)

    def _hear(self, delivery: Delivery) -> None:
        incoming = self._ingest.open(delivery)
        if incoming is not None and isinstance(incoming.message, Hello):
            nonce = self._sessions.greet(incoming.device, incoming.message.nonce)
            self._publisher.welcome(incoming.device, incoming.message.nonce, nonce, time.time(), PROTOCOL_VERSION)
            grant = self._intake.expect(incoming.device, self._devices)
            self._publisher.invite(incoming.device, (1, 1), grant)
        elif incoming is not None and isinstance(incoming.message, Manifest):
            self._intake.begin(incoming.device, incoming.message, time.time())

    def _heard(self, event: IntakeEvent) -> None:
        """On the intake's thread, as in `Uplink`."""
        if isinstance(event, Received):
            self._checks.submit(self._keep, event)
        else:
            self._inbox.put(event)

    def _keep(self, received: Received) -> None:
        try:
            self._store.adopt(received.file, received.manifest.artifact.id)
            self._inbox.put(_Kept(received))
        except OSError as error:
            self._inbox.put(Broken(error))

    def _answer(self, received: Received) -> None:
        self._intake.end(received.device)
        self._intake.expect(received.device, self._devices)  # one invite stands for that of each round
        self._publisher.receipt(received.device, received.manifest, Outcome.ACCEPTED, "")


async def _receive(party: Party, devices: dict[str, str], pipe: Any) -> None:
    await BenchCoordinator(party, devices).run(pipe)
