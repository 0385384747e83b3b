"""A scripted device on an in-memory broker."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifacts import Base, pack, unpack
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import Session, SigningKey, open_envelope, seal, session_id
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transport.transport import Delivery, Will
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.coordinator.toy_artifacts import random_parts, shared_layouts, update_header
from tests.support.edge.receivers import Receiver
from tests.support.wire.artifact_chunks import frames_for, make_ref

REPEAT_S = 1.0


@dataclass
class FakeDevice:
    """A scripted device: joins everything, unless its fields differ. Works on its transport's thread."""

    name: str
    broker: MemoryBroker
    spec: FederationSpec
    coordinator: SigningKey
    key: SigningKey = field(default_factory=SigningKey.generate)
    silent: bool = False
    carrier: schemas.Carrier = schemas.Carrier.MQTT  # over HTTPS the test uploads granted chunks
    decline: schemas.DeclineReason | None = None
    full_round_s: float | None = None  # its report of the time for all steps of a round
    heartbeat_s: int | None = None
    remembers: dict[str, Any] = field(default_factory=dict)  # epoch, round and message key in its hello
    received: list[schemas.AnyMessage] = field(default_factory=list)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    asked_for: list[tuple[int, int]] = field(default_factory=list)
    received_on: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.topics = Topics(self.spec.federation)
        self.session: Session | None = None
        self.nonces = 0
        self.offer: schemas.Offer | schemas.Finished | None = None
        self.receivers: dict[str, Receiver] = {}
        self.pending: tuple[schemas.Manifest, bytes] | None = None
        self.sent_at = 0.0
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self.trained: set[tuple[int, int]] = set()

    def make_transport(self, will: Will) -> MemoryTransport:
        """Return its link; overridden for a real broker."""
        return MemoryTransport(self.broker, self.name, will)

    def start(self) -> Self:
        will = Will(self.topics.status(self.name), seal(self._status(online=False), self.key))
        self.transport = self.make_transport(will)
        own = (self.topics.down_control(self.name), self.topics.down_chunk(self.name))
        for topic in (self.topics.offer, self.topics.coordinator, self.topics.aggregate, *own):
            self.transport.subscribe(topic)
        self.transport.start(self._delivered, self._link)
        threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def stop(self) -> None:
        self.stopped.set()
        self.transport.close()

    def act(self) -> None:
        """Do everything that is possible now, as after a message."""
        with self.lock:
            self._train()

    def _repeat(self) -> None:
        """Resend unanswered messages, like a real device."""
        while not self.stopped.wait(REPEAT_S):
            with self.lock:
                if self.session is None or not self.broker.is_attached(self.transport):
                    continue
                for artifact in list(self.receivers):
                    self._ask(artifact)
                if self.pending is not None and time.monotonic() - self.sent_at >= REPEAT_S:
                    self.sent_at = time.monotonic()
                    self.tell(self.pending[0])

    def receipts(self) -> list[schemas.Receipt]:
        return [message for message in list(self.received) if isinstance(message, schemas.Receipt)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in list(self.received) if isinstance(message, kind)]

    def hello(self) -> None:
        with self.lock:  # not while another thread creates an update in the session that this ends
            self.nonces += 1
            self.nonce = f"{self.nonces:032x}"
            self.session = None
            fields = {**self.addressed(), "nonce": self.nonce, "carrier": self.carrier, "heartbeat_s": self.heartbeat_s}
            hello = schemas.Hello(**{**fields, **self.remembers}, versions=schemas.SPOKEN, agent="fake-1")
            self.transport.publish(self.topics.up_control(self.name), seal(hello, self.key))

    def tell(self, message: schemas.AnyMessage) -> None:
        with self.lock:  # the device's own thread may send concurrently
            assert self.session is not None
            self.transport.publish(self.topics.up_control(self.name), seal(self.session.stamp(message), self.key))

    def send_update(self, round_number: int, attempt: int, data: bytes) -> schemas.Manifest:
        self.pending = (schemas.Manifest(**self.addressed(round_number, attempt), artifact=make_ref(data, 1024)), data)
        self.sent_at = time.monotonic()
        self.tell(self.pending[0])
        return self.pending[0]

    def make_update(self, round_number: int, attempt: int, base: str, **changes: Any) -> bytes:
        layouts = shared_layouts(self.spec)
        parts = random_parts(layouts, seed=1000 * round_number + sum(self.name.encode()), scale=0.05)
        header = update_header(self.spec, round_number, attempt, self.name, base, **changes)
        return pack(header, parts, self.spec.codec, self._base(base))

    def _base(self, artifact: str) -> Base | None:
        """The base of a delta codec's updates."""
        if not self.spec.with_base:
            return None
        decoded = unpack(self.artifacts[artifact], shared_layouts(self.spec)).parts
        return Base(artifact, {part: decoded[part] for part in self.spec.with_base})

    def addressed(self, round_number: int = 0, attempt: int = 0) -> dict[str, Any]:
        at = {"round": round_number, "attempt": attempt}
        return {"federation": self.spec.federation, "sender": self.name, "recipient": schemas.COORDINATOR, **at}

    def _status(self, *, online: bool) -> schemas.DeviceStatus:
        return schemas.DeviceStatus(**self.addressed(), online=online)

    def _link(self, up: bool) -> None:
        if up:
            online = seal(self._status(online=True), self.key)
            self.transport.publish(self.topics.status(self.name), online, retain=True)
            self.hello()

    def _delivered(self, delivery: Delivery) -> None:
        with self.lock:
            self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        self.received_on.add(delivery.topic)
        if delivery.topic in (self.topics.aggregate, self.topics.down_chunk(self.name)):
            self._chunk(delivery.payload)
            return
        message = open_envelope(delivery.payload, {schemas.COORDINATOR: self.coordinator.public}.get)
        self.received.append(message)
        if isinstance(message, schemas.Welcome):
            if self.session is None and message.device_nonce == self.nonce:
                self.session = Session(session_id(self.nonce, message.nonce))
                if self.pending is not None:
                    self.tell(self.pending[0])
        elif isinstance(message, schemas.Offer | schemas.Finished):
            self.offer = message
            self._want(message.aggregate)
        elif (
            isinstance(message, schemas.Invite | schemas.Need | schemas.Receipt) and self.session is not None
        ):  # else from an earlier session
            self.session.admit(message)
            self.in_session(message)

    def in_session(self, message: schemas.Invite | schemas.Need | schemas.Receipt) -> None:
        if isinstance(message, schemas.Invite):
            position = self.addressed(message.round, message.attempt)
            if self.decline is not None:
                self.tell(schemas.Decline(**position, reason=self.decline))
            else:
                told = None if self.full_round_s is None else self.full_round_s * message.share
                self.tell(schemas.Accept(**position, predicted_s=told))
                self._train()
        elif isinstance(message, schemas.Need) and self.pending is not None:
            self.asked_for += message.ranges
            if self.carrier is not schemas.Carrier.HTTPS:
                for frame in frames_for(self.pending[1], self.pending[0].artifact, message.ranges):
                    self.transport.publish(self.topics.up_chunk(self.name), frame)
        elif isinstance(message, schemas.Receipt) and self.pending and message.artifact == self.pending[0].artifact.id:
            self.pending = None  # a late answer to an earlier update has no effect

    def _want(self, ref: schemas.ArtifactRef) -> None:
        if ref.id not in self.artifacts:
            self.receivers.setdefault(ref.id, Receiver(ref))
            self._ask(ref.id)

    def _ask(self, artifact: str) -> None:
        ranges = self.receivers[artifact].next_need(time.monotonic())
        if ranges is not None and self.session is not None:
            self.tell(schemas.Need(**self.addressed(), artifact=artifact, ranges=ranges))

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
        """Answer the open offer after the invitation and the aggregate's arrival; replaces training."""
        offer = self.offer
        if not isinstance(offer, schemas.Offer) or self.session is None or self.silent or self.decline is not None:
            return
        position = (offer.round, offer.attempt)
        invited = any((invite.round, invite.attempt) == position for invite in self.of(schemas.Invite))
        if position in self.trained or not invited or offer.aggregate.id not in self.artifacts:
            return
        unpack(self.artifacts[offer.aggregate.id], shared_layouts(self.spec))
        self.trained.add(position)
        self.send_update(*position, self.make_update(*position, offer.aggregate.id))
