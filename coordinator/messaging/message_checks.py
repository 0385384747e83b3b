"""From bytes on a topic to a message that may be acted on: topic, signature, addressee, session, order.

Everything else is refused and counted with its reason. Keeps the sessions; decides nothing about rounds. Chunks of updates
carry no signature of their own and go to the receiver: the signed manifest names the sha256 of the whole.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from fedcg.wire.errors import (
    MalformedError,
    OtherDeviceError,
    OtherFederationError,
    OtherSessionError,
    Refusals,
    ReplayError,
    WireError,
)
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import Session, VerifyKey, open_envelope, session_id
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transport.transport import Delivery

NONCES_KEPT = 64  # of each device's earlier hellos since the start


MessageT = TypeVar("MessageT", bound=schemas.AnyMessage)


@dataclass(frozen=True)
class FromDevice:
    """A message of a device that passed every check."""

    device: str
    message: schemas.DeviceMessage


@dataclass
class _OpenSession:
    device_nonce: str
    nonce: str
    session: Session
    carrier: schemas.Carrier


class Sessions:
    """The open session of every device; a new hello replaces the session, a repeated one does not."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenSession] = {}
        self._earlier: dict[str, deque[str]] = {}

    def greet(self, device: str, nonce: str, carrier: schemas.Carrier = schemas.Carrier.MQTT) -> str:
        """Open a session for a hello and return the coordinator's nonce for the welcome."""
        known = self._open.get(device)
        if known is not None and known.device_nonce == nonce:
            return known.nonce
        if known is not None:
            self._earlier.setdefault(device, deque(maxlen=NONCES_KEPT)).append(known.device_nonce)
        ours = secrets.token_hex(16)
        self._open[device] = _OpenSession(nonce, ours, Session(session_id(nonce, ours)), carrier)
        return ours

    @property
    def carriers(self) -> frozenset[schemas.Carrier]:
        """How the artifacts of devices with a session travel."""
        return frozenset(known.carrier for known in self._open.values())

    def carrier(self, device: str) -> schemas.Carrier:
        """How a device's artifacts travel, as announced in its hello."""
        known = self._open.get(device)
        return schemas.Carrier.MQTT if known is None else known.carrier

    def check_hello(self, hello: schemas.Hello) -> None:
        """Check that a hello is not the recording of one whose session was replaced since.

        Raises:
            ReplayError: it is.
        """
        if hello.nonce in self._earlier.get(hello.sender, ()):
            raise ReplayError("a hello of a session that a later one has replaced")

    def close(self, device: str) -> None:
        """End the session of a device, if it has one."""
        self._open.pop(device, None)

    def admit(self, device: str, message: schemas.AnyMessage) -> None:
        """Check that a message continues the device's session.

        Raises:
            OtherSessionError: no session, or another one.
            ReplayError: a repeated counter.
        """
        known = self._open.get(device)
        if known is None:
            raise OtherSessionError(f"a {message.kind} message without a session")
        known.session.admit(message)

    def stamp(self, device: str, message: MessageT) -> MessageT | None:
        """The message with the device's session and the next counter; None when the device has no session."""
        known = self._open.get(device)
        return None if known is None else known.session.stamp(message)


class Cohorts:
    """Whether the devices of a federation share one cohort secret, from the marks in their hellos; in memory only."""

    def __init__(self) -> None:
        self._marks: dict[str, str | None] = {}

    def note(self, device: str, mark: str | None) -> tuple[str, ...]:
        """Store a device's mark (None for a device without a secret); returns the devices that have another one."""
        self._marks[device] = mark
        return tuple(sorted(name for name, other in self._marks.items() if other != mark))

    def forget(self, device: str) -> None:
        """Forget the mark of a device that left the federation: the others are judged without it."""
        self._marks.pop(device, None)

    def verdict(self, device: str) -> schemas.CohortVerdict:
        """Whether a device's secret equals those of all other devices that have sent a mark."""
        mine = self._marks.get(device)
        others = {mark for name, mark in self._marks.items() if name != device}
        if not others:
            return schemas.CohortVerdict.ALONE
        return schemas.CohortVerdict.SAME if others == {mine} else schemas.CohortVerdict.DIFFERENT

    def without(self) -> list[str]:
        """The devices without a secret."""
        return sorted(device for device, mark in self._marks.items() if mark is None)

    def outsiders(self) -> dict[str, str]:
        """The devices whose secret is not that of most others, and why they are outside."""
        counts = Counter(mark for mark in self._marks.values() if mark is not None)
        most = max(sorted(counts), key=lambda mark: counts[mark], default=None)
        return {
            device: "it has no cohort secret" if mark is None else "its cohort secret is not that of most devices"
            for device, mark in self._marks.items()
            if mark is None or mark != most
        }


class MessageChecks:
    """Checks deliveries.

    Args:
        topics: of the federation.
        sessions: shared with the publisher.
        refusals: counts and reports refused messages.
    """

    def __init__(self, topics: Topics, sessions: Sessions, refusals: Refusals) -> None:
        self._topics = topics
        self._sessions = sessions
        self._keys: dict[str, VerifyKey] = {}
        self._refusals = refusals

    def learn_keys(self, keys: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Replace the register of public keys: (device, hex) pairs.

        Returns:
            The devices whose earlier key is no longer valid; their sessions are closed.
        """
        known, self._keys = self._keys, {device: VerifyKey.from_hex(text) for device, text in keys}
        gone = frozenset(device for device, key in known.items() if self._keys.get(device) != key)
        for device in gone:
            self._sessions.close(device)
        return gone

    def key_of(self, device: str) -> VerifyKey | None:
        """A device's key, None if it is not in the register."""
        return self._keys.get(device)

    def knows(self, device: str) -> bool:
        """Whether a device's key is in the register."""
        return device in self._keys

    def origin(self, delivery: Delivery) -> tuple[str, TopicKind]:
        """The registered device on whose topic a delivery came, empty for all others, and the kind of topic. From any thread."""
        parsed = self._topics.parse(delivery.topic)
        if parsed is None or parsed.device not in self._keys:
            return "", TopicKind.UP_CONTROL if parsed is None else parsed.kind
        return parsed.device, parsed.kind

    def name_of(self, delivery: Delivery) -> str:
        """The topic of a delivery, for a log: one that no registered device has is not spelled there."""
        device, kind = self.origin(delivery)
        return delivery.topic if device else f"{kind.value} of a device that is not enrolled"

    def open(self, delivery: Delivery) -> FromDevice | None:
        """The message in a delivery, or None when it is refused (and counted)."""
        try:
            return self._open(delivery)
        except WireError as error:
            self._refusals.note(self.name_of(delivery), error, self.origin(delivery)[0])
            return None

    def _open(self, delivery: Delivery) -> FromDevice:
        parsed = self._topics.parse(delivery.topic)
        if parsed is None or parsed.device is None:
            raise MalformedError("not a topic that devices publish on")
        message = open_envelope(delivery.payload, self._keys.get)
        self._check_address(message, parsed.device)
        status_topic = parsed.kind is TopicKind.STATUS
        if isinstance(message, schemas.DeviceStatus) != status_topic:
            raise MalformedError(f"a {message.kind} message on a topic that is not for it")
        if isinstance(message, schemas.Hello):
            self._sessions.check_hello(message)
            return FromDevice(parsed.device, message)
        if isinstance(message, schemas.InSession):
            self._sessions.admit(parsed.device, message)
        elif not isinstance(message, schemas.DeviceStatus):
            raise MalformedError(f"a {message.kind} message is not for the coordinator")
        return FromDevice(parsed.device, message)

    def _check_address(self, message: schemas.AnyMessage, device: str) -> None:
        if message.sender != device:
            raise OtherDeviceError(f"a {message.kind} message of {message.sender!r} on the topic of {device!r}")
        if message.federation != self._topics.federation:
            raise OtherFederationError(f"a message for federation {message.federation!r}")
        wanted = {schemas.COORDINATOR, "*"} if isinstance(message, schemas.DeviceStatus) else {schemas.COORDINATOR}
        if message.recipient not in wanted:
            raise OtherDeviceError(f"a message for {message.recipient!r}")
