"""A coordinator that a test controls step by step, over the in-process broker."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fedcg.learning.spec import FederationSpec
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import Session, SigningKey, open_envelope, seal, session_id
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transport.transport import Delivery
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.edge.receivers import Receiver
from tests.support.wire.artifact_chunks import frames_for, make_ref

DEADLINE_S = 20.0
MessageT = TypeVar("MessageT", bound=schemas.AnyMessage)


@dataclass
class ScriptedCoordinator:
    """The coordinator's side of the protocol, controlled by the test step by step."""

    federation: str
    device: str
    broker: MemoryBroker
    key: SigningKey
    device_key: SigningKey
    epoch: int = 1
    session: Session | None = None
    answers_hello: bool = True
    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    heard: list[schemas.AnyMessage] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    served: dict[str, tuple[schemas.ArtifactRef, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.topics = Topics(self.federation)
        self._inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._nonces = 0
        self._transport = MemoryTransport(self.broker, schemas.COORDINATOR)
        for topic in (self.topics.up_control("+"), self.topics.up_chunk("+"), self.topics.status("+")):
            self._transport.subscribe(topic)
        self._transport.start(self._inbox.put, lambda up: None)

    def close(self) -> None:
        self._transport.close()

    def address(self, recipient: str, round_number: int = 0, attempt: int = 0) -> dict[str, object]:
        return {
            "federation": self.federation,
            "sender": schemas.COORDINATOR,
            "recipient": recipient,
            "epoch": self.epoch,
            "round": round_number,
            "attempt": attempt,
        }

    def publish(
        self, topic: str, message: schemas.AnyMessage, *, retain: bool = False, key: SigningKey | None = None
    ) -> None:
        self._transport.publish(topic, seal(message, key or self.key), retain=retain)

    def tell(self, message: schemas.AnyMessage) -> None:
        """Send a control message to the device, in the session."""
        assert self.session is not None
        self.publish(self.topics.down_control(self.device), self.session.stamp(message))

    def come_online(self) -> None:
        self.publish(
            self.topics.coordinator,
            schemas.CoordinatorStatus(**self.address(schemas.EVERYONE), online=True),
            retain=True,
        )

    def restart(self) -> None:
        """Behave as a new process with a new lease: sessions are dropped."""
        self.epoch += 1
        self.session = None
        self.come_online()

    def serve(self, data: bytes) -> schemas.ArtifactRef:
        """Make an artifact available to Needs."""
        ref = make_ref(data, 300)
        self.served[ref.id] = (ref, data)
        return ref

    def offer(self, spec: FederationSpec, aggregate: bytes, round_number: int, attempt: int = 1) -> None:
        message = schemas.Offer(
            **self.address(schemas.EVERYONE, round_number, attempt),
            spec=self.serve(spec.canonical()),
            aggregate=self.serve(aggregate),
            rounds=spec.rounds,
            deadline_at=0.0,
        )
        self.publish(self.topics.offer, message, retain=True)

    def finish(self, spec: FederationSpec, aggregate: bytes, round_number: int) -> None:
        address = self.address(schemas.EVERYONE, round_number, 1)
        message = schemas.Finished(**address, spec=self.serve(spec.canonical()), aggregate=self.serve(aggregate))
        self.publish(self.topics.offer, message, retain=True)

    def broadcast(self, data: bytes) -> None:
        for frame in frames_for(data, self.serve(data)):
            self._transport.publish(self.topics.aggregate, frame, qos=0)

    def invite(self, round_number: int, attempt: int = 1) -> None:
        self.tell(schemas.Invite(**self.address(self.device, round_number, attempt)))

    def grant(self, manifest: schemas.Manifest, ranges: tuple[tuple[int, int], ...]) -> None:
        address = self.address(self.device, manifest.round, manifest.attempt)
        self.tell(schemas.Need(**address, artifact=manifest.artifact.id, ranges=ranges))

    def receipt(
        self, manifest: schemas.Manifest, outcome: schemas.Outcome = schemas.Outcome.ACCEPTED, reason: str = ""
    ) -> None:
        address = self.address(self.device, manifest.round, manifest.attempt)
        self.tell(schemas.Receipt(**address, artifact=manifest.artifact.id, outcome=outcome, reason=reason))

    def wait(self, kind: type[MessageT], what: str = "", deadline_s: float = DEADLINE_S) -> MessageT:
        """Work until the device sends a message of a kind; return it."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            message = self.step()
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {deadline_s} s {what}; heard {[m.kind for m in self.heard]}")

    def collect(self, manifest: schemas.Manifest) -> bytes:
        """Grant and receive a whole update."""
        receiver = Receiver(manifest.artifact)
        end = time.monotonic() + DEADLINE_S
        while not receiver.complete:
            assert time.monotonic() < end, "the update did not come"
            ranges = receiver.next_need(time.monotonic())
            if ranges is not None:
                self.grant(manifest, ranges)
            self.step()
            while self.frames:
                receiver.feed(parse_chunk(self.frames.pop(0)), time.monotonic())
        return receiver.data()

    def work_until(self, condition: Callable[[], bool], what: str) -> None:
        """Answer the device until a condition holds."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
            self.step()

    def step(self) -> schemas.AnyMessage | None:
        """Handle one delivery; hellos and needs are answered as by the real coordinator."""
        try:
            delivery = self._inbox.get(timeout=0.02)
        except queue.Empty:
            return None
        if delivery.topic == self.topics.up_chunk(self.device):
            self.frames.append(delivery.payload)
            return None
        message = open_envelope(
            delivery.payload, lambda sender: self.device_key.public if sender == self.device else None
        )
        self.heard.append(message)
        if isinstance(message, schemas.Hello):
            if self.answers_hello:
                self._welcome(message)
        elif not isinstance(message, schemas.DeviceStatus):
            if self.session is None or message.session != self.session.session_id:
                return None  # like the real one: ignore an unknown session
            self.session.admit(message)
            if isinstance(message, schemas.Need) and message.artifact in self.served:
                ref, data = self.served[message.artifact]
                for frame in frames_for(data, ref, message.ranges):
                    self._transport.publish(self.topics.down_chunk(self.device), frame, qos=0)
        return message

    def _welcome(self, hello: schemas.Hello) -> None:
        self._nonces += 1
        nonce = f"{self._nonces:032x}"
        self.session = Session(session_id(hello.nonce, nonce))
        welcome = schemas.Welcome(
            **self.address(self.device),
            version=schemas.PROTOCOL_VERSION,
            device_nonce=hello.nonce,
            nonce=nonce,
            server_time=0.0,
            cohort=self.cohort,
        )
        self.publish(self.topics.down_control(self.device), welcome)
