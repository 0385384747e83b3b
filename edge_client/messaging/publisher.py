"""What the agent publishes: signed messages, chunks, its status. A link that is down swallows it; the protocol repeats it."""

from __future__ import annotations

from edge_client.messaging.handshake import Handshake
from edge_client.transfer.https_client import HttpsCarrier
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.messages import COORDINATOR, MAX_CHUNK_BYTES, AnyMessage, DeviceStatus
from fedcg.wire.messages.signing import SigningKey, seal
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunk_window import Ranges
from fedcg.wire.transfer.chunks import chunk_bytes_for
from fedcg.wire.transport.transport import Transport, Will


def offline_will(federation: str, device: str, key: SigningKey) -> Will:
    """What the broker says for this device when it vanishes; signed beforehand."""
    return Will(Topics(federation).status(device), _status(federation, device, key, online=False), retain=True)


def _status(federation: str, device: str, key: SigningKey, *, online: bool) -> bytes:
    return seal(DeviceStatus(federation=federation, sender=device, recipient=COORDINATOR, online=online), key)


class Outgoing:
    """Publishes for one device.

    Args:
        federation: the federation's id.
        device: this device's id.
        key: signs every message.
        transport: the link.
        handshake: stamps messages with session and counter.
        chunk_bytes: largest chunk frame; smaller where the link takes less.
        https: carries chunks in the transport's place; None when they go over MQTT.
    """

    def __init__(
        self,
        federation: str,
        device: str,
        key: SigningKey,
        transport: Transport,
        handshake: Handshake,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        https: HttpsCarrier | None = None,
    ) -> None:
        self._https = https
        self._federation = federation
        self._device = device
        self._key = key
        self._transport = transport
        self._handshake = handshake
        self._topics = Topics(federation)
        self._chunk_bytes = chunk_bytes
        self._sender = ChunkSender(transport, f"chunks-{device}", at_once=True)

    def start(self) -> None:
        """Begin to send chunks."""
        if self._https is not None:
            self._https.start()
        else:
            self._sender.start()

    def close(self) -> None:
        """Stop sending chunks."""
        if self._https is not None:
            self._https.close()
        self._sender.close()

    def subscribe(self, *, chunks: bool = True) -> None:
        """Ask for everything that a device reads, with or without the chunks of artifacts."""
        topics = self._topics
        for topic in (topics.keys, topics.down_control(self._device)):
            self._transport.subscribe(topic)
        self.ask_for_broadcasts()
        if self._https is None and chunks:
            self._transport.subscribe(topics.down_chunk(self._device), 0)
            self._transport.subscribe(topics.aggregate, 0)

    def ask_for_broadcasts(self) -> None:
        """Have the retained broadcasts sent, again when they were refused for want of the coordinator's new key."""
        for topic in (self._topics.offer, self._topics.coordinator):
            self._transport.subscribe(topic)

    def hello(self, epoch: int) -> None:
        """Open a session."""
        self._publish(self._topics.up_control(self._device), seal(self._handshake.hello(epoch), self._key))

    def send(self, message: AnyMessage) -> None:
        """Send a control message inside the session; without one it is dropped, and repeated in the next."""
        if self._handshake.is_open:
            stamped = self._handshake.stamp(message)
            self._publish(self._topics.up_control(self._device), seal(stamped, self._key))

    def chunks(self, update: ChunkFile, ranges: Ranges) -> None:
        """Send granted chunks of the update, as the link takes them."""
        if self._https is not None:
            self._https.send(update, ranges)
        else:
            self._sender.serve(self._topics.up_chunk(self._device), update, ranges)

    @property
    def is_sending(self) -> bool:
        """Whether granted chunks still wait for the link."""
        return self._sender.is_busy if self._https is None else self._https.is_sending

    def end_chunks(self, artifact: str) -> int:
        """Send nothing more of an update; returns how many chunks of it were sent."""
        if self._https is not None:
            return self._https.end(artifact)
        sent = self._sender.sent[artifact]
        self._sender.forget(artifact)
        return sent

    def status(self, *, online: bool) -> None:
        """Tell whether this device's agent is connected."""
        payload = _status(self._federation, self._device, self._key, online=online)
        self._publish(self._topics.status(self._device), payload, retain=True)

    def chunk_bytes(self) -> int:
        """The chunk size that fits the link."""
        return chunk_bytes_for(self._transport.max_payload, self._chunk_bytes)

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False) -> bool:
        try:
            self._transport.publish(topic, payload, retain=retain)
        except TransportError:
            return False
        return True
