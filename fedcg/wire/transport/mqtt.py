"""Transport over MQTT 5 or 3.1.1: connects, reconnects, and keeps its guarantees over broken links.

One thread per transport owns the link and every callback; other threads only add to a bounded queue. If a link breaks, unacknowledged
QoS 1 messages are sent again after the reconnect, and QoS 0 messages are dropped. The connection, on paho, is in `mqtt_link`.
"""

import logging
import random
import socket
import ssl
import threading
import time
from typing import Any

from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from fedcg.wire.errors import TransportError, WireError
from fedcg.wire.transport import mqtt_config
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.transport.mqtt_link import MqttLink, Outgoing, OutgoingQueue
from fedcg.wire.transport.transport import Backlog, Delivery, OnDelivery, OnLink, Publication, Will, call_out

__all__ = ["MqttConfig", "MqttTransport", "TlsFiles", "probe"]

_LOG = logging.getLogger(__name__)
BACKOFF_FIRST_S = 0.2
BACKOFF_CAP_S = 30.0
STEADY_S = 5.0  # a link that lasted this long resets the backoff
DRAIN_S = 2.0  # how long `close` waits for queued messages to leave
CLOSE_S = 1.0  # how long `close` waits for its thread after that
TURN = 32  # messages sent before the other direction gets its turn
TICK_S = 1.0  # how often keepalive is checked without other activity
ANSWER_FACTOR = 2.0  # a broker may take this many times `connect_timeout_s` to answer CONNECT, and then SUBSCRIBE
ACK_S = 60.0  # the longest wait for an acknowledgement; a chunk of 120 KB takes this long at 2 KB/s
HEADER_BYTES = 512  # fixed header, topic (at most 170 bytes in this protocol), properties


def backoff_s(failures: int, rng: random.Random) -> float:
    """Seconds to wait after a number of failures in a row: doubling from 0.2 s to 30 s, reduced by up to half as jitter."""
    ceiling = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2.0 ** min(max(failures - 1, 0), 16))
    return ceiling * (0.5 + 0.5 * rng.random())


class MqttTransport:
    """A client of an MQTT broker that stays connected.

    Args:
        config: the broker and this client's identity on it.
        will: the message that the broker publishes when this client vanishes.
        retry_log_level: of the line about a failed connection.

    Attributes:
        last_error: why there is no link now, for people; None while there is one.
        attempts: number of connections that were tried and have ended.
        max_payload: largest payload in bytes: the broker's maximum packet, or the assumed one, minus the header.
        is_refused: whether the broker refused the last QoS 1 publish, which only MQTT 5 reports; the first one in a row is logged.
    """

    def __init__(self, config: MqttConfig, will: Will | None = None, retry_log_level: int = logging.WARNING) -> None:
        self._config = config
        self._retry_log_level = retry_log_level
        self._will = will
        self._rng = random.Random()
        self._lock = threading.Lock()
        self._outgoing = OutgoingQueue()
        self._filters: dict[str, int] = {}
        self._new_filters: list[tuple[str, int]] = []
        self._closing = threading.Event()
        self._anew = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0.0)
        self._wake_out.settimeout(0.0)
        self._is_woken = False
        self._patience_s = 0.0
        self._thread: threading.Thread | None = None
        self._up = False
        self._accepted = False
        self._answer_by = 0.0
        self._in_flight = config.in_flight
        self._sent: dict[int, Outgoing] = {}  # QoS 1 publishes of this link, by packet id
        self._unanswered: dict[int, list[tuple[str, int]]] = {}  # subscriptions of this link, by packet id
        self._versions = ["3.1.1", "5"] if config.protocol == "auto" else [config.protocol]
        self.max_payload = min(config.assumed_max_packet, config.max_packet) - HEADER_BYTES
        self._on_delivery: OnDelivery = _ignore
        self._on_link: OnLink = _ignore
        self.last_error: str | None = None
        self.attempts = 0
        self.is_refused = False

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect in the background and keep connecting until `close`.

        Raises:
            TransportError: started twice, or TLS files that can't be used.
        """
        if self._thread is not None or self._closing.is_set():
            raise TransportError("a transport can only be started once")
        self._context()  # unusable files raise in the caller, not in a thread
        self._on_delivery, self._on_link = on_delivery, on_link
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{self._config.identity}", daemon=True)
        self._thread.start()

    def wait_linked(self, timeout_s: float) -> None:
        """Wait for the first connection.

        Raises:
            TransportError: all protocol versions failed, or the time is over; with the reason, and what to check.
        """
        deadline = time.monotonic() + timeout_s
        while not self._up:
            if time.monotonic() >= deadline or self.attempts >= len(self._versions):
                raise TransportError(self.last_error or f"no answer from the broker at {self._config.address}")
            time.sleep(0.01)

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Subscribe to a topic filter, now and after every reconnect."""
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
        if len(payload) > self.max_payload:
            raise TransportError(
                f"a payload of {len(payload)} bytes; the broker at {self._config.address} takes {self.max_payload}"
            )
        if not self._up:
            raise TransportError(self.last_error or f"not connected to the broker at {self._config.address}")
        message = Outgoing(topic, payload, qos, retain)
        self._outgoing.put(message)
        self._wake()
        return message

    @property
    def backlog(self) -> Backlog:
        """The messages that are queued, or sent and not acknowledged."""
        return self._outgoing.backlog

    @property
    def protocol(self) -> str:
        """The protocol version in use, or the next one to try."""
        return self._versions[-1]

    def change_will(self, will: Will) -> None:
        """Replace the will. This reconnects without triggering the old will."""
        self._will = will
        self.reconnect()

    def reconnect(self) -> None:
        """Reconnect without triggering the will, for example to use changed TLS files. Nothing unacknowledged is lost."""
        self._anew.set()
        self._wake()

    def be_patient(self, retry_s: float) -> None:
        """Drop the link, if there is one, and from now on wait at least this many seconds before each attempt; 0 ends that."""
        self._patience_s = retry_s
        if retry_s:
            self.reconnect()

    def close(self) -> None:
        """Wait briefly for queued messages to leave, disconnect without triggering the will, and stop the thread.

        A thread that hangs in an unanswered handshake ends later, when the handshake times out.
        """
        self._closing.set()
        self._wake()
        if self._thread is None:
            self._close_wake()
        else:
            self._thread.join(DRAIN_S + CLOSE_S)

    def _wake(self) -> None:
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._wake_in.send(b"x")
        except OSError:
            return  # full: the thread wakes anyway; or closed: no thread is left to wake

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
            delay = max(backoff_s(failures, self._rng), self._patience_s)
            # the caller of `be_patient` has the reason
            level = logging.DEBUG if self._patience_s else self._retry_log_level
            _LOG.log(level, "%s; trying again in %.1f s", self.last_error, delay)
            self._closing.wait(delay)

    def _connect_once(self) -> None:
        self._anew.clear()
        self._accepted, reached, self._sent, self._unanswered = False, False, {}, {}
        link: MqttLink | None = None
        try:
            link = self._make_link(self._context())  # files are read again: they may be renewed
            link.open()
            reached = True
            self._serve(link)
        except TransportError as error:
            self.last_error = str(error)
        except OSError as error:
            self.last_error = mqtt_config.explain_break(self._config, error, reached=reached, accepted=self._accepted)
        except Exception as error:  # noqa: BLE001 - the run loop: invalid bytes from a broker must not end the transport
            if not isinstance(error, WireError):
                _LOG.exception("the MQTT client failed; reconnecting")
            self.last_error = f"the broker at {self._config.address} sent unexpected data: {error}"
        finally:
            if reached and not self._accepted and not self._anew.is_set():
                self._versions.reverse()
            self._link_down()
            if link is not None:
                link.close()
            self.attempts += 1

    def _make_link(self, context: ssl.SSLContext | None) -> MqttLink:
        link = MqttLink(self._config, context, self.protocol, self._will)
        link.on_connect = self._connected
        link.on_subscribe = self._subscribed
        link.on_publish = self._published
        link.on_message = self._arrived
        return link

    def _serve(self, link: MqttLink) -> None:
        """Exchange packets until the transport closes or reconnects.

        Raises:
            TransportError: the broker refuses, closes the connection, or does not answer.
            OSError: the link is broken.
            MalformedError: bytes that a broker may not send.
        """
        own = self._config
        self._await_answer()
        close_at: float | None = None
        while True:
            now = time.monotonic()
            if self._closing.is_set():
                close_at = close_at or now + (DRAIN_S if self._up else 0.0)
            elif (not self._up or self._unanswered) and now >= self._answer_by:
                raise TransportError(f"the broker at {own.address} does not answer")
            elif self._outgoing.owed_s() >= ACK_S:
                raise TransportError(f"the broker at {own.address} has acknowledged no publish for {ACK_S:.0f} s")
            is_busy = self._hand_over(link)
            is_drained = not self._outgoing and not link.want_write()
            if self._anew.is_set() or (close_at is not None and (now >= close_at or is_drained)):
                if self._anew.is_set():
                    self.last_error = f"reconnecting to the broker at {self._config.address}"
                link.hang_up()
                return
            wait_s = 0.0 if is_busy else TICK_S if close_at is None else TICK_S / 10
            if link.move(self._wake_out.fileno(), wait_s):
                self._wake_out.recv(65_536)
                self._is_woken = False  # before the queue is read, so that a later message wakes the thread again

    def _await_answer(self) -> None:
        # On an open link the answer arrives after chunks, like acknowledgements.
        self._answer_by = time.monotonic() + (ACK_S if self._up else ANSWER_FACTOR * self._config.connect_timeout_s)

    def _hand_over(self, link: MqttLink) -> bool:
        """Send the messages that the link takes now and keep the rest in the bounded queue; returns whether the link would take more."""
        if self._accepted and self._new_filters:
            with self._lock:
                filters, self._new_filters = self._new_filters, []
            self._subscribe(link, filters)
        for _ in range(TURN):
            message = self._outgoing.take(self._in_flight) if self._up and not link.want_write() else None
            if message is None:
                return False
            packet = link.publish(message.topic, message.payload, message.qos, message.retain).mid
            if message.qos > 0:
                self._sent[packet] = message
        return True

    def _subscribe(self, link: MqttLink, filters: list[tuple[str, int]]) -> None:
        _, packet = link.subscribe(filters)
        if packet is not None:  # otherwise the connection is broken
            self._unanswered[packet] = filters
            self._await_answer()

    def _arrived(self, _link: Any, _data: Any, message: MQTTMessage) -> None:
        call_out(self._on_delivery, Delivery(message.topic, bytes(message.payload), message.retain))

    def _published(self, _link: Any, _data: Any, packet: int, reason: ReasonCode, _properties: Any) -> None:
        message = self._sent.pop(packet, None)
        if message is None:
            return
        self._outgoing.acknowledged(message)
        if reason.is_failure and not self.is_refused:
            _LOG.warning("the broker at %s refused a publish on %s: %s", self._config.address, message.topic, reason)
        self.is_refused = reason.is_failure

    def _connected(self, link: Any, _data: Any, _flags: Any, reason: ReasonCode, properties: Any) -> None:
        if reason.is_failure:
            raise TransportError(mqtt_config.explain_refusal(self._config, str(reason)))
        self._accepted = link.is_accepted = True
        unstated = mqtt_config.PROTOCOL_MAX_PACKET if self.protocol == "5" else self._config.assumed_max_packet
        largest = min(getattr(properties, "MaximumPacketSize", unstated), self._config.max_packet)
        if largest < mqtt_config.MIN_PACKET_BYTES:
            raise TransportError(mqtt_config.explain_small_packets(self._config, largest))
        self.max_payload = largest - HEADER_BYTES
        self._in_flight = min(self._config.in_flight, getattr(properties, "ReceiveMaximum", self._config.in_flight))
        link.accept_keepalive(getattr(properties, "ServerKeepAlive", None))
        with self._lock:
            filters, self._new_filters = list(self._filters.items()), []
        if filters:
            self._subscribe(link, filters)
        else:
            self._link_up()

    def _subscribed(self, _link: Any, _data: Any, packet: int, reasons: list[ReasonCode], _properties: Any) -> None:
        filters = self._unanswered.pop(packet, None)
        if filters is None:
            return
        answers = [str(reason) if reason.is_failure else "" for reason in reasons]
        if any(answers) or len(answers) != len(filters):
            raise TransportError(
                mqtt_config.explain_subscription(self._config, [topic for topic, _ in filters], answers)
            )
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
    """Connect once and disconnect, for `fedcg doctor`; returns the protocol version that the broker accepted.

    Raises:
        TransportError: with the reason, and what to check.
    """
    transport = MqttTransport(config)
    transport.start(_ignore, _ignore)
    try:
        transport.wait_linked(timeout_s)
        return transport.protocol
    finally:
        transport.close()


def _ignore(_: object) -> None:
    """A callback that does nothing."""
