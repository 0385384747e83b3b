"""From bytes on a topic to an event of the state machine: signature, addressee, topic, session and order are checked here.

Whatever fails a check is refused with its reason and changes nothing.
"""

from __future__ import annotations

from edge_client.messaging.coordinator_trust import CoordinatorTrust
from edge_client.messaging.handshake import Handshake
from edge_client.session.events import (
    CoordinatorSeen,
    Ended,
    Event,
    Granted,
    Invited,
    Offered,
    Receipted,
    TurnedAway,
    Welcomed,
)
from edge_client.transfer.downloads import Downloads
from fedcg.wire.errors import MalformedError, OldEpochError, OtherDeviceError, OtherFederationError
from fedcg.wire.messages.key_chain import PinnedKey
from fedcg.wire.messages.messages import (
    COORDINATOR,
    EVERYONE,
    AnyMessage,
    CoordinatorStatus,
    Finished,
    Invite,
    Left,
    Need,
    Offer,
    Receipt,
    Refusal,
    RoundAttempt,
    Welcome,
)
from fedcg.wire.messages.signing import open_envelope
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transfer.chunks import read_frame
from fedcg.wire.transport.transport import Delivery


class Incoming:
    """Checks what the broker delivers to one device.

    Args:
        federation: the federation's id.
        device: this device's id.
        memory: the coordinator's key, the only one that is listened to, and the highest broadcast; the caller makes it durable.
        handshake: the open session.
        downloads: where chunks go.
    """

    def __init__(
        self,
        federation: str,
        device: str,
        memory: CoordinatorTrust,
        handshake: Handshake,
        downloads: Downloads,
    ) -> None:
        self._topics = Topics(federation)
        self._federation = federation
        self._device = device
        self._memory = memory
        self._order = memory.order
        self._handshake = handshake
        self._downloads = downloads

    def open(self, delivery: Delivery, now: float) -> Event | PinnedKey | Left | None:
        """What a delivery means: an event, another key of the coordinator, the end of the membership, or nothing but a chunk.

        Raises:
            WireError: it is refused; says why.
            OSError: a chunk that the disk did not take.
        """
        parsed = self._topics.parse(delivery.topic)
        if parsed is None:
            raise MalformedError(f"{delivery.topic!r} is no topic of this federation")
        if parsed.kind in (TopicKind.AGGREGATE, TopicKind.DOWN_CHUNK):
            self._downloads.feed(read_frame(delivery.payload), now)
            return None
        if parsed.kind is TopicKind.KEYS:
            return self._memory.follow(delivery.payload)
        message = open_envelope(delivery.payload, lambda sender: self._memory.key if sender == COORDINATOR else None)
        self._check_address(message)
        if parsed.kind in (TopicKind.OFFER, TopicKind.COORDINATOR):
            return self._broadcast(message, parsed.kind, live=not delivery.retained)
        if parsed.kind is TopicKind.DOWN_CONTROL:
            return self._direct(message)
        raise MalformedError(f"a {message.kind} message on a topic that a device does not read")

    def _check_address(self, message: AnyMessage) -> None:
        if message.sender != COORDINATOR:
            raise OtherDeviceError(
                f"a {message.kind} message from {message.sender!r}; a device listens to the coordinator only"
            )
        if message.federation != self._federation:
            raise OtherFederationError(f"a {message.kind} message of federation {message.federation!r}")
        is_broadcast = isinstance(message, Offer | Finished | CoordinatorStatus)
        if message.recipient != (EVERYONE if is_broadcast else self._device):
            raise OtherDeviceError(f"a {message.kind} message for {message.recipient!r}")

    def _broadcast(self, message: AnyMessage, kind: TopicKind, *, live: bool) -> Event:
        if isinstance(message, CoordinatorStatus) != (kind is TopicKind.COORDINATOR):
            raise MalformedError(f"a {message.kind} message on the topic {kind.value}")
        self._order.admit(message)
        if isinstance(message, CoordinatorStatus):
            return CoordinatorSeen(message.epoch, message.online)
        if isinstance(message, Offer):
            return Offered(message, live)
        if isinstance(message, Finished):
            return Ended(message)
        raise MalformedError(f"a {message.kind} message on the topic {kind.value}")

    def _direct(self, message: AnyMessage) -> Event | Left:
        if isinstance(message, Welcome | Refusal):
            if message.epoch < self._order.highest[0]:
                raise OldEpochError(f"a {message.kind} of epoch {message.epoch} after epoch {self._order.highest[0]}")
            if isinstance(message, Refusal):
                return TurnedAway(self._handshake.refusal(message))
            self._handshake.welcome(message)
            return Welcomed(message.epoch, message.cohort, message.version)
        self._handshake.admit(message)
        if isinstance(message, Invite):
            return Invited(RoundAttempt(message.round, message.attempt), message.cohort)
        if isinstance(message, Need):
            return Granted(message)
        if isinstance(message, Receipt):
            return Receipted(message)
        if isinstance(message, Left):
            return message
        raise MalformedError(f"a {message.kind} message on a device's own topic")
