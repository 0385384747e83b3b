"""Checks incoming messages: limits the rate per device, and verifies topic, signature, recipient, session and order.

All other messages are refused and counted by reason. A device that stays above the rate of any honest device is silenced: the service removes it
from the broker's access list. Keeps the sessions; decides nothing about rounds. Chunks of updates have no separate signature and go to the receiver: the signed manifest contains the sha256 of the whole.
"""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coordinator.token_buckets import Buckets, Rate
from fedcg.values import Value
from fedcg.wire import errors
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import Session, VerifyKey, open_envelope, session_id
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transport.transport import Delivery

NONCES_KEPT = 64  # number of each device's earlier hellos remembered since the start


MessageT = TypeVar("MessageT", bound=schemas.AnyMessage)


class FromDevice(Value):
    """A message of a device that passed all checks."""

    device: str
    message: schemas.DeviceMessage


@dataclass
class _OpenSession:
    device_nonce: str
    nonce: str
    session: Session
    carrier: schemas.Carrier


class Sessions:
    """The open session of every device. A new hello replaces the session; a repeated one does not."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenSession] = {}
        self._earlier: dict[str, deque[str]] = {}

    def greet(self, device: str, nonce: str, carrier: schemas.Carrier = schemas.Carrier.MQTT) -> str:
        """Open a session for a hello; return the coordinator's nonce for the welcome."""
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
        """The carriers of artifacts for all devices with a session."""
        return frozenset(known.carrier for known in self._open.values())

    def carrier(self, device: str) -> schemas.Carrier:
        """The carrier of a device's artifacts, from its hello."""
        known = self._open.get(device)
        return schemas.Carrier.MQTT if known is None else known.carrier

    def check_hello(self, hello: schemas.Hello) -> None:
        """Check that a hello is not the replay of one whose session has been replaced.

        Raises:
            ReplayError: it is a replay.
        """
        if hello.nonce in self._earlier.get(hello.sender, ()):
            raise errors.ReplayError("a hello of a session that was replaced by a later one")

    def close(self, device: str) -> None:
        """End a device's session, if any."""
        self._open.pop(device, None)

    def admit(self, device: str, message: schemas.AnyMessage) -> None:
        """Check that a message continues the device's session.

        Raises:
            OtherSessionError: no session, or a different one.
            ReplayError: a repeated counter.
        """
        known = self._open.get(device)
        if known is None:
            raise errors.OtherSessionError(f"a {message.kind} message without a session")
        known.session.admit(message)

    def stamp(self, device: str, message: MessageT) -> MessageT | None:
        """The message with the device's session and the next counter; None if the device has no session."""
        known = self._open.get(device)
        return None if known is None else known.session.stamp(message)


class Cohorts:
    """Whether the devices of a federation share one cohort secret, from the marks in their hellos; in memory only."""

    def __init__(self) -> None:
        self._marks: dict[str, str | None] = {}

    def note(self, device: str, mark: str | None) -> tuple[str, ...]:
        """Store a device's mark (None without a secret); return the devices with a different mark."""
        self._marks[device] = mark
        return tuple(sorted(name for name, other in self._marks.items() if other != mark))

    def forget(self, device: str) -> None:
        """Drop the mark of a device that left the federation."""
        self._marks.pop(device, None)

    def verdict(self, device: str) -> schemas.CohortVerdict:
        """Whether a device's secret equals the secrets of all other devices with a mark."""
        mine = self._marks.get(device)
        others = {mark for name, mark in self._marks.items() if name != device}
        if not others:
            return schemas.CohortVerdict.ALONE
        if others == {mine}:
            return schemas.CohortVerdict.SAME
        is_like_the_rest = mine is not None and others <= {mine, None}
        return schemas.CohortVerdict.LACKING if is_like_the_rest else schemas.CohortVerdict.DIFFERENT

    def without(self) -> list[str]:
        """The devices without a secret."""
        return sorted(device for device, mark in self._marks.items() if mark is None)

    def outsiders(self) -> dict[str, str]:
        """The devices whose secret differs from that of most others, and the reason."""
        counts = Counter(mark for mark in self._marks.values() if mark is not None)
        most = max(sorted(counts), key=lambda mark: counts[mark], default=None)
        return {
            device: "it has no cohort secret" if mark is None else "its cohort secret differs from that of most devices"
            for device, mark in self._marks.items()
            if mark is None or mark != most
        }


class MessageChecks:
    """Checks deliveries.

    Args:
        topics: the federation's topics.
        sessions: shared with the publisher.
        refusals: counts and reports refused messages.
    """

    def __init__(self, topics: Topics, sessions: Sessions, refusals: errors.Refusals) -> None:
        self._topics = topics
        self._sessions = sessions
        self._keys: dict[str, VerifyKey] = {}
        self._refusals = refusals

    def learn_keys(self, keys: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Replace the register of public keys: (device, hex) pairs.

        Returns:
            The devices whose earlier key is no longer valid; their sessions end.
        """
        known, self._keys = self._keys, {device: VerifyKey.from_hex(text) for device, text in keys}
        gone = frozenset(device for device, key in known.items() if self._keys.get(device) != key)
        for device in gone:
            self._sessions.close(device)
        return gone

    def knows(self, device: str) -> bool:
        """Whether a device's key is in the register."""
        return device in self._keys

    def origin(self, delivery: Delivery) -> tuple[str, TopicKind]:
        """The registered device of a delivery's topic (empty for others), and the kind of topic. Thread-safe."""
        parsed = self._topics.parse(delivery.topic)
        if parsed is None or parsed.device not in self._keys:
            return "", TopicKind.UP_CONTROL if parsed is None else parsed.kind
        return parsed.device, parsed.kind

    def name_of(self, delivery: Delivery) -> str:
        """A delivery's topic for the log; topics of unregistered devices are not spelled out."""
        device, kind = self.origin(delivery)
        return delivery.topic if device else f"{kind.value} of a device that is not enrolled"

    def open(self, delivery: Delivery) -> FromDevice | None:
        """The message in a delivery; None if it is refused (and counted)."""
        try:
            return self._open(delivery)
        except errors.WireError as error:
            self._refusals.note(self.name_of(delivery), error, self.origin(delivery)[0])
            return None

    def _open(self, delivery: Delivery) -> FromDevice:
        parsed = self._topics.parse(delivery.topic)
        if parsed is None or parsed.device is None:
            raise errors.MalformedError("not a topic that devices publish on")
        message = open_envelope(delivery.payload, self._keys.get)
        self._check_address(message, parsed.device)
        status_topic = parsed.kind is TopicKind.STATUS
        if isinstance(message, schemas.DeviceStatus) != status_topic:
            raise errors.MalformedError(f"a {message.kind} message on a wrong topic")
        if isinstance(message, schemas.Hello):
            self._sessions.check_hello(message)
            return FromDevice(parsed.device, message)
        if isinstance(message, schemas.InSession):
            self._sessions.admit(parsed.device, message)
        elif not isinstance(message, schemas.DeviceStatus):
            raise errors.MalformedError(f"a {message.kind} message is not for the coordinator")
        return FromDevice(parsed.device, message)

    def _check_address(self, message: schemas.AnyMessage, device: str) -> None:
        if message.sender != device:
            raise errors.OtherDeviceError(f"a {message.kind} message of {message.sender!r} on the topic of {device!r}")
        if message.federation != self._topics.federation:
            raise errors.OtherFederationError(f"a message for federation {message.federation!r}")
        wanted = {schemas.COORDINATOR, "*"} if isinstance(message, schemas.DeviceStatus) else {schemas.COORDINATOR}
        if message.recipient not in wanted:
            raise errors.OtherDeviceError(f"a message for {message.recipient!r}")


# per device and topic kind: the grants for a download of 900 MB; 8 chunks per grant allow 190 MB/s
MESSAGES = Rate(1000, 200.0)
# per device on all topics, without granted chunks: 4,000/s are a flood after one second, 600/s after 30
FLOOD = Rate(3000, 500.0)
SILENCE_S = 600.0
# lines in the event log per device, of kinds that it can cause at will; allows a round every two seconds
LINES = Rate(200, 0.5)
MAX_BYTES = 64 * 1024 * 1024
SENDER_BYTES = 1024 * 1024
ITEM_BYTES = 4096
"""Smallest size counted for an item: limits waiting items to 256 per sender and 16,384 in total."""
LIMITED_EVENTS = frozenset({"accepted", "cohort_differs", "declined", "offline", "online", "update_refused"})

Item = TypeVar("Item")


class LineLimit:
    """Limits event log lines that a device can repeat at will; all other lines are written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines: Buckets[str] = Buckets(LINES, clock)

    def allows(self, event: str, client: str) -> bool:
        """Whether another line of this kind about this device may be written."""
        return event not in LIMITED_EVENTS or self._lines.take(client)


class FloodLimits:
    """Decides, on the transport's thread, which messages of a device are processed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._messages: Buckets[tuple[str, TopicKind]] = Buckets(MESSAGES, clock)
        self._all: Buckets[str] = Buckets(FLOOD, clock)
        self._silenced: dict[str, float] = {}

    def admits(self, device: str, kind: TopicKind) -> bool:
        """Whether a message may be processed.

        Args:
            device: the sender; empty for unregistered devices, which share a bucket.
            kind: kind of its topic.
        """
        if device in self._silenced:
            return False
        if device and not self._all.take(device):
            self._silenced[device] = self._clock() + SILENCE_S
            return False
        return self._messages.take((device, kind))

    def is_silenced(self, device: str) -> bool:
        """Whether messages of a device are currently ignored."""
        return device in self._silenced

    def silenced(self) -> frozenset[str]:
        """The currently silenced devices; thread-safe. After its silence, a device starts with a full bucket."""
        now = self._clock()
        for device, until in list(self._silenced.items()):
            if now >= until:
                self._all.forget(device)
                del self._silenced[device]
        return frozenset(self._silenced)


@dataclass
class _Queue(Generic[Item]):
    items: deque[tuple[Item, int]] = field(default_factory=deque)
    bytes: int = 0


class EventQueue(Generic[Item]):
    """The single queue of the service: any thread puts, the loop takes. The service's own items come first, then the senders in turns, each in order.

    If a sender or all senders exceed their limit, an item is dropped and counted. Senders repeat unanswered messages.
    """

    def __init__(self) -> None:
        self._own: deque[Item] = deque()
        self._senders: dict[str, _Queue[Item]] = {}  # senders with items, the next one first
        self._bytes = 0  # of all senders
        self._filled = threading.Condition()
        self.dropped = 0

    def put(self, item: Item, size: int = 0, sender: str = "") -> None:
        """Add an item. Items of size 0 (the service's own) are never dropped.

        Args:
            item: what to add.
            size: its bytes.
            sender: the device that sent it.
        """
        with self._filled:
            if size == 0:
                self._own.append(item)
            elif not self._add(item, size, sender):
                self.dropped += 1
                return
            self._filled.notify()

    def get(self, timeout_s: float) -> Item | None:
        """The next item; None after the timeout."""
        with self._filled:
            if not self._own and not self._senders:
                self._filled.wait(timeout_s)
            if self._own:
                return self._own.popleft()
            return self._take() if self._senders else None

    def _add(self, item: Item, size: int, sender: str) -> bool:
        queue = self._senders.get(sender) or _Queue()
        size = max(size, ITEM_BYTES)
        if queue.bytes + size > SENDER_BYTES or self._bytes + size > MAX_BYTES:
            return False
        queue.items.append((item, size))
        queue.bytes += size
        self._senders[sender] = queue
        self._bytes += size
        return True

    def _take(self) -> Item:
        sender = next(iter(self._senders))
        queue = self._senders.pop(sender)
        item, size = queue.items.popleft()
        queue.bytes -= size
        if queue.items:
            self._senders[sender] = queue  # after the others
        self._bytes -= size
        return item
