"""The link to the coordinator: hello and welcome, signing of outgoing messages, checks of incoming messages.

Signature, recipient, topic, session and order are checked. A message that fails a check is refused with a reason and has no effect.
Messages sent while the link is down are dropped, because the protocol repeats them. A hello and its repetitions use the same nonce, so a late
answer is still valid. A coordinator's nonce is accepted once, so a recorded welcome can't restore an old session.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from edge_client.session import signals
from edge_client.store.private_store import PrivateStore
from fedcg.wire import errors
from fedcg.wire.messages import envelopes, schemas
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transfer.chunks import Chunk, read_frame
from fedcg.wire.transport.transport import Delivery, Transport, Will

MessageT = TypeVar("MessageT", bound=schemas.AnyMessage)


@dataclass(eq=False)
class Handshake:
    """Keeps the nonces and the open session of one device.

    Args:
        federation: the federation's id.
        device: this device's id.
        agent: program version for the hello.
        cohort: mark of the cohort secret; None without one.
        heartbeat_s: the longest silence that this device promises.
        carrier: how its artifacts are transferred.
        is_check: only test whether the coordinator answers.
    """

    federation: str
    device: str
    agent: str
    cohort: str | None = None
    heartbeat_s: int | None = None
    carrier: schemas.Carrier = schemas.Carrier.MQTT
    is_check: bool = field(kw_only=True, default=False)
    _nonce: str | None = field(default=None, init=False)
    _answers: set[str] = field(default_factory=set, init=False)
    _session: envelopes.Session | None = field(default=None, init=False)

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    def close(self) -> None:
        """Close the session. The next hello opens a new one."""
        if self._session is not None:
            self._session, self._nonce = None, None

    def hello(
        self, epoch: int, committed: schemas.RoundAttempt = schemas.NO_ATTEMPT, key: str | None = None
    ) -> schemas.Hello:
        """The hello to send: with the highest received epoch, the last trained round attempt and the coordinator's current key."""
        self.close()
        if self._nonce is None:
            self._nonce, self._answers = secrets.token_hex(16), set()
        return schemas.Hello(
            federation=self.federation,
            sender=self.device,
            recipient=schemas.COORDINATOR,
            epoch=epoch,
            **vars(committed),
            nonce=self._nonce,
            versions=schemas.SPOKEN,
            agent=self.agent,
            cohort=self.cohort,
            heartbeat_s=self.heartbeat_s,
            carrier=self.carrier,
            check=self.is_check,
            key=key,
        )

    def welcome(self, message: schemas.Welcome) -> None:
        """Open the session of a welcome.

        Raises:
            ReplayError: it answers no hello of this device, or was used before.
            VersionError: it selects a version that was not offered.
        """
        if message.device_nonce != self._nonce or message.nonce in self._answers:
            raise errors.ReplayError("a welcome that answers no hello of this device, or answers one again")
        if message.version not in schemas.SPOKEN:
            raise errors.VersionError(f"a welcome for protocol version {message.version}, not {schemas.SPOKEN}")
        self._answers.add(message.nonce)
        self._session = envelopes.Session(envelopes.session_id(message.device_nonce, message.nonce))

    def refusal(self, message: schemas.Refusal) -> str:
        """The reason for refusing a hello, as text.

        Raises:
            ReplayError: it answers no hello of this device.
        """
        if message.device_nonce != self._nonce or self.is_open:
            raise errors.ReplayError("a refusal that answers no hello of this device")
        return schemas.explain_versions(message.device_versions, message.versions)

    def stamp(self, message: MessageT) -> MessageT:
        """Add session and counter to a message.

        Raises:
            OtherSessionError: no session is open.
        """
        if self._session is None:
            raise errors.OtherSessionError(f"a {message.kind} message can't be sent without a session")
        return self._session.stamp(message)

    def admit(self, message: schemas.AnyMessage) -> None:
        """Check that a message belongs to the session and is new.

        Raises:
            OrderError: it does not belong to the session or is not new.
            OtherSessionError: no session is open.
        """
        if self._session is None:
            raise errors.OtherSessionError(f"a {message.kind} message came without a session")
        self._session.admit(message)


class CoordinatorTrust:
    """The order of broadcasts and the coordinator's key. Changes apply immediately and become durable with `save`.

    A key change that was lost in a crash is followed again, because the coordinator keeps the whole chain.

    Args:
        store: where the state is saved.
        federation: the federation's id.
        enrolled: the coordinator's key from enrolment. If it has changed, the device was enrolled again, and keys followed from the earlier
            one are void.
    """

    def __init__(self, store: PrivateStore, federation: str, enrolled: envelopes.VerifyKey) -> None:
        self._store = store
        self._federation = federation
        self._enrolled = enrolled
        self.order = envelopes.BroadcastOrder(store.seen())
        self._saved = (self.order.highest, store.pinned_key(enrolled))
        self._pinned = self._saved[1]
        self._replaced: frozenset[str] = frozenset()

    @property
    def key(self) -> envelopes.VerifyKey:
        """The coordinator's current key."""
        return self._pinned.key

    def follow(self, data: bytes) -> envelopes.PinnedKey | None:
        """Process an envelope with the coordinator's key chain. Returns the newly pinned key if it has changed.

        Raises:
            WireError: it is refused; the message has the reason.
        """
        before, self._pinned = self._pinned, envelopes.open_key_chain(data, self._federation, self._pinned)
        chain = envelopes.read_envelope(data).message
        assert isinstance(chain, schemas.KeyChain)
        self._replaced = frozenset(link.old for link in chain.links)
        return None if before.key == self._pinned.key else self._pinned

    def is_of_replaced_key(self, data: bytes) -> bool:
        """Whether an envelope is signed by a key that has been replaced: it is outdated, but not a forgery.

        Raises:
            WireError: it is not an envelope.
        """
        envelope = envelopes.read_envelope(data)
        return not envelope.is_signed_by(self.key) and any(
            envelope.is_signed_by(envelopes.VerifyKey.from_hex(key)) for key in self._replaced
        )

    def save(self) -> None:
        """Save changes durably.

        Raises:
            OSError: the disk failed; the next call retries.
        """
        highest, pinned = self._saved
        if self._pinned != pinned:
            self._store.save_pinned_key(self._enrolled, self._pinned)
            self._saved = (highest, self._pinned)
        if self.order.highest != highest:
            self._store.save_seen(self.order.highest)
            self._saved = (self.order.highest, self._pinned)


def offline_will(federation: str, device: str, key: envelopes.SigningKey) -> Will:
    """The message that the broker publishes when this device disconnects unexpectedly, signed in advance."""
    return Will(Topics(federation).status(device), _status(federation, device, key, online=False), retain=True)


def _status(federation: str, device: str, key: envelopes.SigningKey, *, online: bool) -> bytes:
    return envelopes.seal(
        schemas.DeviceStatus(federation=federation, sender=device, recipient=schemas.COORDINATOR, online=online), key
    )


@dataclass(eq=False)
class CoordinatorLink:
    """Messages of one device, in both directions.

    Args:
        federation: the federation's id.
        device: this device's id.
        key: signs every message.
        transport: the connection to the broker.
        trust: the coordinator's key and the highest broadcast. The caller saves it.
        handshake: the open session.
        on_sent: called with kind and size in bytes of each message passed to the transport.

    Attributes:
        older_epoch: epoch of the running coordinator, if its refused status is behind the epoch known here; else None.
    """

    federation: str
    device: str
    key: envelopes.SigningKey
    transport: Transport
    trust: CoordinatorTrust
    handshake: Handshake
    on_sent: Callable[[str, int], None] = lambda kind, size: None
    older_epoch: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._order = self.trust.order
        self._topics = Topics(self.federation)

    # Out

    def subscribe(self, *, chunks: bool) -> None:
        """Subscribe to all topics of a device, with or without artifact chunks."""
        topics = self._topics
        for topic in (topics.keys, topics.down_control(self.device)):
            self.transport.subscribe(topic)
        self.ask_for_broadcasts()
        if chunks:
            self.transport.subscribe(topics.down_chunk(self.device), 0)
            self.transport.subscribe(topics.aggregate, 0)

    def ask_for_broadcasts(self) -> None:
        """Subscribe to the retained broadcasts. Also called again if they were refused because the coordinator's new key was missing."""
        for topic in (self._topics.offer, self._topics.coordinator):
            self.transport.subscribe(topic)

    @property
    def why_refused(self) -> str:
        """Why this device refuses the running coordinator, as text; empty if it does not."""
        if self.older_epoch is None:
            return ""
        return (
            f"the running coordinator is at epoch {self.older_epoch}, behind epoch {self._order.highest[0]} that this device has seen, and is "
            "refused; ask the operator: `fedcg coordinator status` shows the remedy under `devices are ahead`"
        )

    def hello(self, epoch: int, committed: schemas.RoundAttempt | None = None) -> None:
        """Send a hello with the highest received epoch and the last trained round attempt."""
        hello = self.handshake.hello(epoch, committed or schemas.NO_ATTEMPT, self.trust.key.hex)
        self._publish("hello", self._topics.up_control(self.device), envelopes.seal(hello, self.key))

    def send(self, message: schemas.AnyMessage) -> None:
        """Send a control message in the session. Without a session it is dropped, and repeated in the next one."""
        if self.handshake.is_open:
            stamped = self.handshake.stamp(message)
            self._publish(message.kind, self._topics.up_control(self.device), envelopes.seal(stamped, self.key))

    def status(self, *, online: bool) -> None:
        """Publish whether this device's agent is connected."""
        payload = _status(self.federation, self.device, self.key, online=online)
        self._publish("device_status", self._topics.status(self.device), payload, retain=True)

    def _publish(self, kind: str, topic: str, payload: bytes, *, retain: bool = False) -> None:
        try:
            self.transport.publish(topic, payload, retain=retain)
        except errors.TransportError:
            return
        self.on_sent(kind, len(payload))

    # In

    def name_of(self, delivery: Delivery) -> str:
        """The topic of a delivery for logs. Topics that this device does not read are not logged verbatim."""
        is_ours = self._topics.may_read(self.device, delivery.topic)
        return delivery.topic if is_ours else "a topic that this device does not read"

    def open(self, delivery: Delivery) -> signals.Input | envelopes.PinnedKey | Chunk | None:
        """Check a delivery. Returns an event, a new key of the coordinator, a chunk, or None if it has no effect.

        Raises:
            WireError: it is refused; the message has the reason.
        """
        parsed = self._topics.parse(delivery.topic)
        if parsed is None:
            raise errors.MalformedError("not a topic of this federation")
        if parsed.kind in (TopicKind.AGGREGATE, TopicKind.DOWN_CHUNK):
            return read_frame(delivery.payload)
        if parsed.kind is TopicKind.KEYS:
            return self.trust.follow(delivery.payload)
        is_broadcast = parsed.kind in (TopicKind.OFFER, TopicKind.COORDINATOR)
        if delivery.retained and is_broadcast and self.trust.is_of_replaced_key(delivery.payload):
            return None  # retained from before the new key; the coordinator will replace it
        message = envelopes.open_envelope(
            delivery.payload, lambda sender: self.trust.key if sender == schemas.COORDINATOR else None
        )
        self._check_address(message)
        if is_broadcast:
            return self._broadcast(message, parsed.kind, live=not delivery.retained)
        if parsed.kind is TopicKind.DOWN_CONTROL:
            return self._direct(message)
        raise errors.MalformedError(f"a {message.kind} message on a topic that a device does not read")

    def _check_address(self, message: schemas.AnyMessage) -> None:
        if message.sender != schemas.COORDINATOR:
            raise errors.OtherDeviceError(
                f"a {message.kind} message from {message.sender!r}; devices only accept messages from the coordinator"
            )
        if message.federation != self.federation:
            raise errors.OtherFederationError(f"a {message.kind} message of federation {message.federation!r}")
        is_broadcast = isinstance(message, schemas.Offer | schemas.Finished | schemas.CoordinatorStatus)
        if message.recipient != (schemas.EVERYONE if is_broadcast else self.device):
            raise errors.OtherDeviceError(f"a {message.kind} message for {message.recipient!r}")

    def _broadcast(self, message: schemas.AnyMessage, kind: TopicKind, *, live: bool) -> signals.Input:
        if isinstance(message, schemas.CoordinatorStatus) != (kind is TopicKind.COORDINATOR):
            raise errors.MalformedError(f"a {message.kind} message on the topic {kind.value}")
        if isinstance(message, schemas.CoordinatorStatus):
            self.older_epoch = message.epoch if message.online and message.epoch < self._order.highest[0] else None
        self._order.admit(message)
        if isinstance(message, schemas.CoordinatorStatus):
            return signals.CoordinatorSeen(message.epoch, message.online)
        if isinstance(message, schemas.Offer):
            return signals.Offered(message, live)
        if isinstance(message, schemas.Finished):
            return message
        raise errors.MalformedError(f"a {message.kind} message on the topic {kind.value}")

    def _direct(self, message: schemas.AnyMessage) -> signals.Input | None:
        if isinstance(message, schemas.Revoked):  # of an earlier device with this name, if the key differs
            return signals.Revoked() if message.key == self.key.public.hex else None
        if isinstance(message, schemas.Welcome | schemas.Refusal):
            if message.epoch < self._order.highest[0]:
                raise errors.OldEpochError(
                    f"a {message.kind} of epoch {message.epoch} after epoch {self._order.highest[0]}"
                )
            if isinstance(message, schemas.Refusal):
                return signals.HelloRefused(self.handshake.refusal(message))
            self.handshake.welcome(message)
            self.older_epoch = None
            return signals.Welcomed(message.epoch, message.cohort, message.version, message.server_time)
        self.handshake.admit(message)
        if isinstance(message, schemas.Invite):
            return signals.Invited(message.at, message.cohort, message.share)
        if isinstance(message, schemas.Need | schemas.Receipt):
            return message
        if isinstance(message, schemas.SumDown):
            return signals.SumStepped(message.at, message.body, message.exchange)
        if isinstance(message, schemas.Left):
            return signals.Left()
        raise errors.MalformedError(f"a {message.kind} message on a device's own topic")
