"""The environment of `fedcg bench coordinator`: a coordinator's home, a Mosquitto process, and processes of devices that join rounds without training.

Transfers use the product's own code: envelopes, chunk frames, sha256, fsync, receipts. Torch-free.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.broker.access_lists import publish_access
from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.members.enrolment import make_bundles
from coordinator.operations.operations import open_federation
from coordinator.paths import Home
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.records import FederationRecord
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from edge_client.link.coordinator_link import Handshake
from experiments.demo.processes import Children, children
from experiments.demo.run_folder import LOOPBACK, free_ports
from fedcg.child_python import spawning
from fedcg.find_mosquitto import find_mosquitto
from fedcg.learning.spec import FederationPlan
from fedcg.values import Value
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey, open_envelope, seal
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender, file_ref
from fedcg.wire.transfer.chunks import chunk_bytes_for, read_frame
from fedcg.wire.transfer.partial_files import DurableReceiver, Partials
from fedcg.wire.transfer.windows import limits_for
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.transport.transport import Delivery

FEDERATION = "bench"
SECONDS_MAX = 300.0
READY_S = 60.0
PROCESSES = 2
"""Of devices."""
HELLO_AGAIN_S = 0.5
MANIFEST_AGAIN_S = 5.0
LIMITS = limits_for()
MakeUpdate = Callable[[str, int, int, Path], bytes]


class Party(Value):
    """The identity of a bench process.

    Attributes:
        mqtt: the broker, and the identity at the broker.
        bundle: folder with its keys and artifacts.
    """

    mqtt: MqttConfig
    bundle: Path


@dataclass(eq=False)
class BenchDevice:
    """One session: joins every round immediately.

    Args:
        party: its identity.
        coordinator: the coordinator's public key.
        inbox: receives (this device, delivery or link change).
        make_update: returns the update of (device, round, attempt, file of the base, which is named by its sha256).

    Attributes:
        receipts: the receipt of each update, by round and attempt; None while it is pending.
    """

    party: Party
    coordinator: VerifyKey
    inbox: queue.SimpleQueue[tuple[BenchDevice, Delivery | bool]]
    make_update: MakeUpdate

    def __post_init__(self) -> None:
        party, self.name = self.party, self.party.mqtt.identity
        self._key = SigningKey.load(party.bundle / "signing.key")
        self._topics = Topics(FEDERATION)
        self._transport = MqttTransport(party.mqtt)
        self._sender = ChunkSender(self._transport, f"chunks-{self.name}")
        self._store = ArtifactStore(party.bundle / "artifacts")
        self._partials = Partials(party.bundle / "artifacts" / ".partial", 4, 1 << 40)
        self._handshake = Handshake(FEDERATION, self.name, agent="bench")
        self._hello_at = math.inf
        self._update: ChunkFile | None = None
        self._manifest: schemas.Manifest | None = None
        self._manifest_at = 0.0
        self.receipts: dict[tuple[int, int], schemas.Outcome | None] = {}
        self._download: DurableReceiver | None = None
        self._offer: schemas.Offer | None = None
        self._invited: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Connect."""
        for topic in (self._topics.down_control(self.name), self._topics.offer):
            self._transport.subscribe(topic)
        for topic in (self._topics.down_chunk(self.name), self._topics.aggregate):
            self._transport.subscribe(topic, 0)
        self._sender.start()
        self._transport.start(lambda item: self.inbox.put((self, item)), lambda up: self.inbox.put((self, up)))

    def close(self) -> None:
        """Disconnect."""
        self._sender.close()
        self._transport.close()

    def take(self, item: Delivery | bool) -> None:
        """Handle a delivery or a change of the link."""
        if isinstance(item, bool):
            if item:
                self._hello(time.monotonic())
        elif item.topic in (self._topics.aggregate, self._topics.down_chunk(self.name)):
            self._take_chunk(item.payload)
        else:
            self._receive(open_envelope(item.payload, lambda _sender: self.coordinator))

    def look_after(self, now: float) -> None:
        """Repeat unanswered messages, and request missing data."""
        if not self._handshake.is_open and now >= self._hello_at:
            self._hello(now)
        if self._manifest is not None and now >= self._manifest_at:
            self._announce(self._manifest, now)
        if self._download is None or not self._handshake.is_open:
            return
        ranges = self._download.next_need(now)
        if ranges is not None:
            self._send(schemas.Need(**self._addressed(), artifact=self._download.ref.id, ranges=ranges))

    def _hello(self, now: float) -> None:
        self._hello_at = now + HELLO_AGAIN_S
        self._publish(self._handshake.hello(0))

    def _receive(self, message: schemas.AnyMessage) -> None:
        if isinstance(message, schemas.Welcome):
            if not self._handshake.is_open:  # every repeated hello gets one
                self._handshake.welcome(message)
        elif isinstance(message, schemas.Offer):
            self._offer = message
            if not self._store.has(message.aggregate.id):
                self._download = self._partials.open(message.aggregate, LIMITS.window)
        elif isinstance(message, schemas.Need) and self._update is not None:
            self._sender.serve(self._topics.up_chunk(self.name), self._update, message.ranges)
        elif isinstance(message, schemas.Invite):
            self._invited.add((message.round, message.attempt))
            self._send(schemas.Accept(**self._addressed(message.round, message.attempt)))
            self._work()
        elif (
            isinstance(message, schemas.Receipt)
            and self._manifest is not None
            and message.artifact == self._manifest.artifact.id
        ):
            self.receipts[self._manifest.round, self._manifest.attempt] = message.outcome
            self._manifest = None
        elif isinstance(message, schemas.Finished):
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
        """Replace training: create the update immediately, and store it durably like an outbox."""
        offer = self._offer
        if offer is None or not self._store.has(offer.aggregate.id):
            return
        position = (offer.round, offer.attempt)
        if position not in self._invited or position in self.receipts:
            return
        self.receipts[position] = None
        base = self._store.path(offer.aggregate.id)
        path = self._store.path(self._store.put(self.make_update(self.name, *position, base)))
        ref = file_ref(path, chunk_bytes_for(self._transport.max_payload, LIMITS.chunk_bytes))
        self._update = ChunkFile(path, ref)
        self._manifest = schemas.Manifest(**self._addressed(*position), artifact=ref)
        self._announce(self._manifest, time.monotonic())

    def _announce(self, manifest: schemas.Manifest, now: float) -> None:
        """Send a manifest, which is repeated until its receipt arrives."""
        self._manifest_at = now + MANIFEST_AGAIN_S
        self._send(manifest)

    def _addressed(self, round_number: int = 0, attempt: int = 0) -> dict[str, Any]:
        return {
            "federation": FEDERATION,
            "sender": self.name,
            "recipient": schemas.COORDINATOR,
            "round": round_number,
            "attempt": attempt,
        }

    def _send(self, message: schemas.AnyMessage) -> None:
        if self._handshake.is_open:
            self._publish(self._handshake.stamp(message))

    def _publish(self, message: schemas.AnyMessage) -> None:
        self._transport.publish(self._topics.up_control(self.name), seal(message, self._key))


def run_devices(parties: tuple[Party, ...], coordinator: str, make_update: MakeUpdate, pipe: Any) -> None:
    """Run sessions in a separate process until the other end of the pipe sends something. Then send the receipts of each device."""
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
    pipe.send({device.name: device.receipts for device in devices})
    for device in devices:
        device.close()


def device_name(number: int) -> str:
    """Return the id of a bench device."""
    return f"device-{number:04}"


def new_home(root: Path) -> Home:
    """Create the home of a coordinator on free ports of this machine."""
    broker_port, api_port = free_ports(2)
    config = CoordinatorConfig(broker=BrokerSettings(port=broker_port, host=LOOPBACK), api=ApiSettings(port=api_port))
    return create_home(root / "home", config)


@asynccontextmanager
async def running_broker(home: Home) -> AsyncIterator[Children]:
    """Run the broker of a home while the context lasts; more processes may be added.

    Raises:
        BrokerError: no Mosquitto here.
        ProcessError: the broker does not start.
    """
    if find_mosquitto() is None:
        raise BrokerError("the bench needs a Mosquitto on this machine: run `make setup-broker`")
    async with children(home.root / "logs") as processes:
        broker = processes.fork("broker", "broker", "run", "--dir", home.root, outlives_others=True)
        await processes.line(broker, "ready", READY_S)
        yield processes


def enrol(home: Home, names: Sequence[str], plan: FederationPlan) -> FederationRecord:
    """Add a federation and its devices while the broker runs."""
    with closing(Store.of(home)) as store, changing_members(home):
        record = open_federation(home, store, plan)
        make_bundles(home, store, names, _bundles(home), time.time(), FEDERATION)
        publish_access(home)
    return record


def _bundles(home: Home) -> Path:
    return home.root.parent / "devices"


@contextmanager
def device_processes(home: Home, names: Sequence[str], make_update: MakeUpdate) -> Iterator[list[Any]]:
    """Run enrolled devices in separate processes; yields our ends of their pipes, over which `run_devices` is stopped and answers.

    Args:
        home: the home of their coordinator.
        names: the devices' names.
        make_update: creates their updates.
    """
    with closing(Store.of(home)) as store:
        coordinator = load_signing_identity(home, store).key.public.hex
    parties, context = [_party(home, name) for name in names], spawning()
    started = []
    try:
        for first in range(min(PROCESSES, len(parties))):
            ours, theirs = context.Pipe()
            given = (tuple(parties[first::PROCESSES]), coordinator, make_update, theirs)
            process = context.Process(target=run_devices, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        yield [ours for _, ours in started]
    finally:
        for process, ours in started:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()


def _party(home: Home, name: str) -> Party:
    broker, bundle = home.config().broker, _bundles(home) / name
    tls = TlsFiles(*(bundle / "tls" / file for file in ("ca.pem", "device.pem", "device.key")))
    mqtt = MqttConfig(broker.host, broker.port, name, tls=tls, protocol="5", in_flight=LIMITS.in_flight)
    return Party(mqtt, bundle)


def expect(pipe: Any) -> Any:
    """Return the next message from the other end of a pipe.

    Raises:
        BrokerError: no message arrives, or its process exited.
    """
    if not pipe.poll(SECONDS_MAX):
        raise BrokerError(f"a process of the bench sent nothing for {SECONDS_MAX} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise BrokerError("a process of the bench exited; its traceback is above") from error
