"""Transport over MQTT 5 or 3.1.1: connects, and connects again, and keeps its promises over broken links.

One thread per transport owns the link and every callback; other threads only put into a bounded queue. What was sent and not
acknowledged when a link broke is sent again after the reconnect when it was QoS 1, and dropped when it was QoS 0. Packets are
in `mqtt_packets`, the connection in `mqtt_link`; why no library does this: docs/decisions/011.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
import time

from fedcg.wire.errors import MalformedError, TransportError, WireError
from fedcg.wire.mqtt_config import (
    MIN_PACKET_BYTES,
    PROTOCOL_MAX_PACKET,
    MqttConfig,
    TlsFiles,
    explain_break,
    explain_refusal,
    explain_small_packets,
    explain_subscription,
)
from fedcg.wire.mqtt_link import MqttLink
from fedcg.wire.mqtt_packets import (
    FAILURE,
    Acknowledged,
    Connected,
    Ended,
    Message,
    Packet,
    Subscribed,
    acknowledge,
    connect,
    disconnect,
    explain,
    publish,
    subscribe,
)
from fedcg.wire.outgoing import MAX_PACKET_ID, Outgoing, OutgoingQueue
from fedcg.wire.transport import Backlog, Delivery, OnDelivery, OnLink, Publication, Will, call_out

__all__ = ["MqttConfig", "MqttTransport", "TlsFiles", "probe"]

_LOG = logging.getLogger(__name__)
BACKOFF_FIRST_S = 0.2
BACKOFF_CAP_S = 30.0
STEADY_S = 5.0  # a link that stood so long starts the backoff anew
DRAIN_S = 2.0  # how long `close` lets queued messages leave
CLOSE_S = 1.0  # how long `close` waits for its thread after that
TURN = 32  # messages that leave before the other direction has its turn
TICK_S = 1.0  # how often keepalive is looked after when nothing happens
ANSWER_FACTOR = 2.0  # a broker may take this many times `connect_timeout_s` to answer CONNECT, and then SUBSCRIBE
ACK_S = 60.0  # without any acknowledgement while some are owed; at 2 KB/s a chunk of 120 KB takes so long
HEADER_BYTES = 512  # fixed header, topic (at most 170 bytes for us), properties


def backoff_s(failures: int, rng: random.Random) -> float:
    """Seconds to wait after so many failures in a row: doubling from 0.2 s to 30 s, up to half of it taken off as jitter."""
    ceiling = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2.0 ** min(max(failures - 1, 0), 16))
    return ceiling * (0.5 + 0.5 * rng.random())


class MqttTransport:
    """A client of an MQTT broker that keeps itself connected.

    Args:
        config: the broker and who we are on it.
        will: what the broker says when we vanish.
        rng: jitter of the backoff.

    Attributes:
        last_error: why there is no link now, for people; None while there is one.
        attempts: connections tried so far.
    """

    def __init__(self, config: MqttConfig, will: Will | None = None, rng: random.Random | None = None) -> None:
        self._config = config
        self._will = will
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._outgoing = OutgoingQueue(config.queue_max, config.queue_max_bytes)
        self._filters: dict[str, int] = {}
        self._new_filters: list[tuple[str, int]] = []
        self._closing = threading.Event()
        self._anew = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)
        self._is_called = False  # somebody has something for the thread; set before `_is_asleep` is looked at
        self._is_asleep = False  # the thread waits, or is about to; set before `_is_called` is looked at
        self._thread: threading.Thread | None = None
        self._up = False
        self._accepted = False
        self._answer_by = 0.0
        self._in_flight = config.in_flight
        self._unanswered: dict[int, list[tuple[str, int]]] = {}  # subscriptions of this link, by packet id
        self._last_subscription = 0
        self._versions = ["3.1.1", "5"] if config.protocol == "auto" else [config.protocol]
        self._max_payload = min(config.assumed_max_packet, config.max_packet) - HEADER_BYTES
        self._on_delivery: OnDelivery = _ignore
        self._on_link: OnLink = _ignore
        self.last_error: str | None = None
        self.attempts = 0

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect in the background and keep connecting until `close`.

        Raises:
            TransportError: started twice, or TLS files that can't be used.
        """
        if self._thread is not None or self._closing.is_set():
            raise TransportError("a transport is started once")
        self._context()  # files that can't be used are told to the caller, not to a thread
        self._on_delivery, self._on_link = on_delivery, on_link
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{self._config.identity}", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Ask for a topic filter, now and after every reconnect."""
        with self._lock:
            self._filters[topic] = qos
            self._new_filters.append((topic, qos))
        self._wake()

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Publication:
        """Queue bytes for the broker.

        Raises:
            TransportError: not connected, the outgoing queue is full, no topic, or the payload is over `max_payload`.
        """
        if not topic or "+" in topic or "#" in topic:
            raise TransportError(f"{topic!r} is not a topic to publish on")
        if len(payload) > self._max_payload:
            raise TransportError(
                f"a payload of {len(payload)} bytes; the broker at {self._config.address} takes {self._max_payload}"
            )
        if not self._up:
            raise TransportError(self.last_error or f"not connected to the broker at {self._config.address}")
        message = Outgoing(topic, payload, qos, retain)
        self._outgoing.put(message)
        self._wake()
        return message

    @property
    def backlog(self) -> Backlog:
        """What is queued, or sent and not acknowledged."""
        return self._outgoing.backlog

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes: the broker's maximum packet, or the assumed one, minus the header."""
        return self._max_payload

    @property
    def protocol(self) -> str:
        """The protocol version in use, or the one that is tried next."""
        return self._versions[-1]

    def change_will(self, will: Will) -> None:
        """Leave another will from now on; this connects anew, without triggering the old one."""
        self._will = will
        self.reconnect()

    def reconnect(self) -> None:
        """Connect anew, without triggering the will, so that changed TLS files count. Nothing unacknowledged is lost."""
        self._anew.set()
        self._wake()

    def close(self) -> None:
        """Let queued messages leave for a moment, disconnect without triggering the will, stop the thread.

        A thread that hangs in a handshake nobody answers is not waited for; it ends by itself when that times out.
        """
        self._closing.set()
        self._wake()
        if self._thread is None:
            self._close_wake()
        else:
            self._thread.join(DRAIN_S + CLOSE_S)

    def _wake(self) -> None:
        self._is_called = True
        if not self._is_asleep:
            return
        self._is_asleep = False
        try:
            self._wake_in.send(b"x")
        except OSError:
            return  # full, so it wakes anyway; or closed, so nobody is left to wake

    def _close_wake(self) -> None:
        self._wake_in.close()
        self._wake_out.close()

    def _context(self) -> ssl.SSLContext | None:
        return None if self._config.tls is None else self._config.tls.context()

    def _run(self) -> None:
        try:
            self._keep_connecting()
        finally:
            self._close_wake()

    def _keep_connecting(self) -> None:
        failures = 0
        while not self._closing.is_set():
            began = time.monotonic()
            self._connect_once()
            if self._closing.is_set():
                return
            failures = 1 if self._accepted and time.monotonic() - began > STEADY_S else failures + 1
            delay = backoff_s(failures, self._rng)
            _LOG.warning("%s; trying again in %.1f s", self.last_error, delay)
            self._closing.wait(delay)

    def _connect_once(self) -> None:
        self._anew.clear()
        self.attempts += 1
        self._accepted, reached, self._unanswered = False, False, {}
        link: MqttLink | None = None
        try:
            link = MqttLink(self._config, self._context(), self.protocol)  # files are read again: they may be renewed
            reached = True
            self._serve(link)
        except TransportError as error:
            self.last_error = str(error)
        except OSError as error:
            self.last_error = explain_break(self._config, error, reached=reached, accepted=self._accepted)
        except Exception as error:  # noqa: BLE001 - the run loop: broken bytes from a broker must not end the transport
            if not isinstance(error, WireError):
                _LOG.exception("the MQTT client failed; connecting again")
            self.last_error = f"the broker at {self._config.address} sent something unexpected: {error}"
        finally:
            if reached and not self._accepted and not self._anew.is_set():
                self._versions.reverse()
            self._link_down()
            if link is not None:
                link.close()

    def _serve(self, link: MqttLink) -> None:
        """Move packets until the transport closes or connects anew.

        Raises:
            TransportError: the broker refuses, hangs up, or does not answer.
            OSError: the link is gone.
            MalformedError: bytes that a broker may not send.
        """
        link.watch(self._wake_out.fileno())
        own = self._config
        link.send(connect(self.protocol, own.identity, own.keepalive_s, own.max_inbound, self._will))
        self._await_answer()
        close_at: float | None = None
        while True:
            now = time.monotonic()
            self._is_called = False  # before everything that a caller could have changed is looked at
            if self._closing.is_set():
                close_at = close_at or now + (DRAIN_S if self._up else 0.0)
            elif (not self._up or self._unanswered) and now >= self._answer_by:
                raise TransportError(f"the broker at {own.address} does not answer")
            elif self._outgoing.owed_s() >= ACK_S:
                raise TransportError(f"the broker at {own.address} has acknowledged no publish for {ACK_S:.0f} s")
            is_busy = self._hand_over(link)
            is_drained = not self._outgoing and link.has_room
            if self._anew.is_set() or (close_at is not None and (now >= close_at or is_drained)):
                if self._anew.is_set():
                    self.last_error = f"connecting anew to the broker at {self._config.address}"
                link.hang_up(disconnect())
                return
            self._sleep(link, 0.0 if is_busy else TICK_S if close_at is None else TICK_S / 10)
            for packet in link.read():
                self._take(packet, link)
            link.look_after(time.monotonic())

    def _await_answer(self) -> None:
        # On a link that stands the answer comes behind chunks, as acknowledgements do.
        self._answer_by = time.monotonic() + (ACK_S if self._up else ANSWER_FACTOR * self._config.connect_timeout_s)

    def _sleep(self, link: MqttLink, seconds: float) -> None:
        """Wait for the link or a caller; not at all when one of them was faster."""
        self._is_asleep = True
        if self._is_called or link.holds_more:
            seconds = 0.0
        if link.wait(seconds):
            self._wake_out.recv(65_536)
        self._is_asleep = False

    def _hand_over(self, link: MqttLink) -> bool:
        """Let leave what the link takes at once, and the rest stay in our bounded queue; whether the link would take more."""
        if self._accepted and self._new_filters:
            with self._lock:
                filters, self._new_filters = self._new_filters, []
            self._subscribe(link, filters)
        link.flush()
        for _ in range(TURN):
            message = self._outgoing.take(self._in_flight) if self._up and link.has_room else None
            if message is None:
                return False
            link.send(publish(self.protocol, message.topic, message.payload, message.packet, retain=message.retain))
            link.flush()
        return True

    def _subscribe(self, link: MqttLink, filters: list[tuple[str, int]]) -> None:
        self._last_subscription = self._last_subscription % MAX_PACKET_ID + 1
        packet = MAX_PACKET_ID + self._last_subscription
        self._unanswered[packet] = filters
        self._await_answer()
        link.send(subscribe(self.protocol, packet, filters))

    def _take(self, packet: Packet, link: MqttLink) -> None:
        if not self._accepted and not isinstance(packet, Connected | Ended):
            raise MalformedError("a packet before the answer to CONNECT")
        if isinstance(packet, Message):
            call_out(self._on_delivery, Delivery(packet.topic, packet.payload, packet.retained))
            if packet.packet:
                link.send(acknowledge(packet.packet))
        elif isinstance(packet, Acknowledged):
            message = self._outgoing.acknowledged(packet.packet)
            if message is not None and packet.reason >= FAILURE:
                address, reason = self._config.address, explain(packet.reason)
                _LOG.error("the broker at %s refused a publish on %s: %s", address, message.topic, reason)
        elif isinstance(packet, Connected):
            self._connected(packet, link)
        elif isinstance(packet, Subscribed):
            self._subscribed(packet)
        elif isinstance(packet, Ended):
            raise ConnectionError(explain(packet.reason))

    def _connected(self, told: Connected, link: MqttLink) -> None:
        if told.reason:
            raise TransportError(explain_refusal(self._config, explain(told.reason)))
        if self._accepted:
            raise MalformedError("a second answer to one CONNECT")
        self._accepted = True
        unstated = PROTOCOL_MAX_PACKET if self.protocol == "5" else self._config.assumed_max_packet
        largest = min(told.max_packet or unstated, self._config.max_packet)
        if largest < MIN_PACKET_BYTES:
            raise TransportError(explain_small_packets(self._config, largest))
        self._max_payload = largest - HEADER_BYTES
        self._in_flight = min(self._config.in_flight, told.in_flight or self._config.in_flight)
        if told.keepalive_s:  # 0 is none, and a longer one than ours hides a dead link; a ping is always allowed
            link.keepalive_s = min(link.keepalive_s, told.keepalive_s)
        with self._lock:
            filters, self._new_filters = list(self._filters.items()), []
        if filters:
            self._subscribe(link, filters)
        else:
            self._link_up()

    def _subscribed(self, answer: Subscribed) -> None:
        filters = self._unanswered.pop(answer.packet, None)
        if filters is None:
            return
        answers = [explain(reason) if reason >= FAILURE else "" for reason in answer.reasons]
        if any(answers) or len(answers) != len(filters):
            raise TransportError(explain_subscription(self._config, [topic for topic, _ in filters], answers))
        if not self._up and not self._unanswered:
            self._link_up()

    def _link_up(self) -> None:
        self.last_error = None
        self._up = True
        call_out(self._on_link, argument=True)

    def _link_down(self) -> None:
        was_up, self._up = self._up, False
        self._outgoing.link_lost()
        if was_up and not self._closing.is_set():
            call_out(self._on_link, argument=False)


def probe(config: MqttConfig, timeout_s: float = 10.0) -> str:
    """Connect once and hang up, for a doctor; returns the protocol version that the broker took.

    Raises:
        TransportError: why it did not work, and what to look at.
    """
    transport = MqttTransport(config)
    linked = threading.Event()
    transport.start(_ignore, lambda _up: linked.set())
    tries = 2 if config.protocol == "auto" else 1
    deadline = time.monotonic() + timeout_s
    try:
        while not linked.wait(0.05):
            if time.monotonic() >= deadline or (transport.attempts > tries):
                raise TransportError(transport.last_error or f"no answer from the broker at {config.address}")
        return transport.protocol
    finally:
        transport.close()


def _ignore(_: object) -> None:
    """A callback of nobody."""
