"""Builds, stamps, signs and publishes the coordinator's messages and chunks. Decides nothing.

Messages that can't be passed to the broker are dropped and logged, since the protocol repeats them all: offers and status after a
reconnect, offers, invites and grants by timer, receipts after a repeated manifest.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.messaging.incoming import Cohorts, Sessions
from coordinator.pki.signing_keys import SigningIdentity
from fedcg.wire.errors import TransportError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunk_sender import ChunkFile, ChunkSender
from fedcg.wire.transfer.chunks import chunk_bytes_for
from fedcg.wire.transfer.windows import DEFAULT_PRESET, PRESETS, LinkLimits, Ranges
from fedcg.wire.transport.transport import Transport, Will

log = logging.getLogger(__name__)


def _envelope(
    federation: str, epoch: int, recipient: str = schemas.EVERYONE, at: schemas.RoundAttempt = schemas.NO_ATTEMPT
) -> dict[str, Any]:
    return {"federation": federation, "sender": schemas.COORDINATOR, "recipient": recipient, "epoch": epoch, **vars(at)}


def status_message(federation: str, epoch: int, *, online: bool) -> schemas.CoordinatorStatus:
    """The coordinator's status, to publish retained."""
    return schemas.CoordinatorStatus(**_envelope(federation, epoch), online=online)


def status_will(topics: Topics, epoch: int, key: SigningKey) -> Will:
    """The message that the broker publishes if the coordinator disconnects; signed in advance."""
    return Will(topics.coordinator, seal(status_message(topics.federation, epoch, online=False), key))


@dataclass(eq=False)
class Publisher:
    """Publishes for the coordinator in one federation and epoch. Thread-safe.

    Attributes:
        sender: sends chunks.
    """

    transport: Transport
    topics: Topics
    signing_identity: SigningIdentity
    epoch: int
    sessions: Sessions
    cohorts: Cohorts
    limits: LinkLimits = PRESETS[DEFAULT_PRESET]

    def __post_init__(self) -> None:
        self.sender = ChunkSender(self.transport, "chunks")
        self._lock = threading.Lock()  # messages of a session are sent in the order of their counters

    @property
    def chunk_bytes(self) -> int:
        """The chunk size for the link and the configuration."""
        return chunk_bytes_for(self.transport.max_payload, self.limits.chunk_bytes)

    def status(self, *, online: bool) -> bool:
        """Publish, retained, whether the coordinator is online."""
        message = status_message(self.topics.federation, self.epoch, online=online)
        return self._publish(self.topics.coordinator, message, retain=True)

    def has_key(self, key: str | None) -> bool:
        """Whether a hello's message key, in hex, is the current one or one that it replaced; None if the hello has no key."""
        identity = self.signing_identity
        return key in (None, identity.key.public.hex, *(link.old for link in identity.links))

    def use(self, signing_identity: SigningIdentity) -> bool:
        """Sign with this key from now on. A new key is published first, and again first after each reconnect.

        Returns:
            Whether the key is new.
        """
        if signing_identity.links == self.signing_identity.links:
            return False
        self.signing_identity = signing_identity
        self.keys()
        self.transport.change_will(status_will(self.topics, self.epoch, signing_identity.key))
        return True

    def connect_anew(self) -> None:
        """Reconnect with a new session, so that the broker discards its queue. Honest devices repeat their messages, as after any lost link.

        After a flood, Mosquitto 2.0.11 delivered messages of other devices seconds late; a new session fixed that.
        """
        self.transport.change_will(status_will(self.topics, self.epoch, self.signing_identity.key))

    def keys(self) -> bool:
        """Publish, retained, the history of the message key; nothing while the first key is in use."""
        links = self.signing_identity.links[-schemas.MAX_KEY_LINKS :]
        if not links:
            return True
        message = schemas.KeyChain(**self._to(schemas.EVERYONE), links=links)
        return self._publish(self.topics.keys, message, retain=True)

    def offer(
        self,
        at: schemas.RoundAttempt,
        spec: schemas.ArtifactRef,
        aggregate: schemas.ArtifactRef,
        rounds: int,
        deadline_at: float,
    ) -> bool:
        """Publish, retained, the offer of the open (round, attempt)."""
        message = schemas.Offer(
            **self._to(schemas.EVERYONE, at), spec=spec, aggregate=aggregate, rounds=rounds, deadline_at=deadline_at
        )
        return self._publish(self.topics.offer, message, retain=True)

    def finished(self, at: schemas.RoundAttempt, spec: schemas.ArtifactRef, aggregate: schemas.ArtifactRef) -> bool:
        """Publish, retained, that the federation is over."""
        message = schemas.Finished(**self._to(schemas.EVERYONE, at), spec=spec, aggregate=aggregate)
        return self._publish(self.topics.offer, message, retain=True)

    def welcome(self, device: str, device_nonce: str, nonce: str, server_time: float, version: int) -> bool:
        """Answer a hello with the session's protocol version."""
        message = schemas.Welcome(
            **self._to(device),
            version=version,
            device_nonce=device_nonce,
            nonce=nonce,
            server_time=server_time,
            cohort=self.cohorts.verdict(device),
        )
        return self._publish(self.topics.down_control(device), message)

    def refuse_hello(self, device: str, hello: schemas.Hello) -> bool:
        """Answer a hello without a supported protocol version."""
        message = schemas.Refusal(
            **self._to(device),
            device_nonce=hello.nonce,
            versions=schemas.SPOKEN,
            device_versions=hello.versions,
            update=schemas.outdated(hello.versions, schemas.SPOKEN),
        )
        return self._publish(self.topics.down_control(device), message)

    def invite(self, device: str, at: schemas.RoundAttempt, share: float = 1.0) -> bool:
        """Ask a device to participate in (round, attempt) with a share of the spec's local steps."""
        return self._send(
            device, schemas.Invite(**self._to(device, at), cohort=self.cohorts.verdict(device), share=share)
        )

    def left(self, device: str) -> bool:
        """Confirm that a device is no longer a member."""
        return self._send(device, schemas.Left(**self._to(device)))

    def revoked(self, device: str, key: str) -> bool:
        """Notify the device with this message key of its revocation, outside of a session."""
        return self._publish(self.topics.down_control(device), schemas.Revoked(**self._to(device), key=key))

    def sum_step(
        self, device: str, at: schemas.RoundAttempt, exchange: schemas.SumExchange, step: schemas.ToDevice
    ) -> bool:
        """Send a step of the sealed sum of (round, attempt)."""
        return self._send(device, schemas.SumDown(**self._to(device, at), exchange=exchange, body=step))

    def need(self, device: str, manifest: schemas.Manifest, ranges: Ranges) -> bool:
        """Grant chunks of an announced update."""
        return self._send(
            device, schemas.Need(**self._to(device, manifest.at), artifact=manifest.artifact.id, ranges=ranges)
        )

    def receipt(
        self, device: str, at: schemas.RoundAttempt, artifact: str, outcome: schemas.Outcome, reason: str
    ) -> bool:
        """End an update, or send the result of an accepted one."""
        message = schemas.Receipt(**self._to(device, at), artifact=artifact, outcome=outcome, reason=reason[:300])
        return self._send(device, message)

    def chunks(self, device: str, source: ChunkFile, ranges: Ranges) -> None:
        """Send the chunks that a device requested, at the link's speed; the device requests lost chunks again."""
        self.sender.serve(self.topics.down_chunk(device), source, ranges)

    def broadcast(self, source: ChunkFile, is_current: Callable[[], bool]) -> None:
        """Send an aggregate to all devices, paced, at most once. Devices request missing chunks.

        Nothing is sent if every device fetches over HTTPS.
        """
        if self.sessions.carriers == {schemas.Carrier.HTTPS}:
            return
        burst = self.limits.window.chunks_of(source.ref.chunk_bytes)
        self.sender.broadcast(self.topics.aggregate, source, is_current, self.limits.broadcast_bytes_per_s, burst)

    def carrier(self, device: str) -> schemas.Carrier:
        """The carrier of a device's artifacts."""
        return self.sessions.carrier(device)

    def _to(self, recipient: str, at: schemas.RoundAttempt = schemas.NO_ATTEMPT) -> dict[str, Any]:
        return _envelope(self.topics.federation, self.epoch, recipient, at)

    def _send(self, device: str, message: schemas.AnyMessage) -> bool:
        with self._lock:
            stamped = self.sessions.stamp(device, message)
            return stamped is not None and self._publish(self.topics.down_control(device), stamped)

    def _publish(self, topic: str, message: schemas.AnyMessage, *, retain: bool = False) -> bool:
        try:
            self.transport.publish(topic, seal(message, self.signing_identity.key), retain=retain)
        except TransportError as error:
            log.info("not published on %s: %s", topic, error)
            return False
        return True
