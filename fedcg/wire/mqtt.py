"""Transport over MQTT 5 or 3.1.1, on paho 2. The only module that imports paho.

One thread per transport owns the paho client, its socket and every callback; paho's own threads and its reconnecting are
not used, because they resend an oversize publish for ever, queue without a bound, and die silently of an exception in a
callback. Other threads only put into a bounded queue. What was sent and not acknowledged when a link broke is sent again
after the reconnect when it was QoS 1, and dropped when it was QoS 0.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import ssl
import threading
import time
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedcg.wire.errors import TransportError
from fedcg.wire.mqtt_config import (
    PROTOCOL_MAX_PACKET,
    MqttConfig,
    TlsFiles,
    explain_failure,
    explain_refusal,
    explain_silence,
)
from fedcg.wire.outgoing import Outgoing, OutgoingQueue
from fedcg.wire.transport import Backlog, Delivery, OnDelivery, OnLink, Publication, Will, call_out

__all__ = ["MqttConfig", "MqttTransport", "TlsFiles", "probe"]

_LOG = logging.getLogger(__name__)
BACKOFF_FIRST_S = 0.2
BACKOFF_CAP_S = 30.0
STEADY_S = 5.0  # a link that stood so long starts the backoff anew
DRAIN_S = 2.0  # how long `close` lets queued messages leave
CLOSE_S = 1.0  # how long `close` waits for its thread after that
TICK_MS = 1000  # how often keepalive is looked after when nothing happens
ANSWER_FACTOR = 2.0  # a broker that took the connection may take this many times `connect_timeout_s` to answer CONNECT
HEADER_BYTES = 512  # fixed header, topic (at most 170 bytes for us), properties
OK = MQTTErrorCode.MQTT_ERR_SUCCESS


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
        self._is_woken = False
        self._thread: threading.Thread | None = None
        self._up = False
        self._reached = False  # TCP and TLS stood, whatever the broker said then
        self._accepted = False
        self._refusal: str | None = None
        self._in_flight = config.in_flight
        self._subscribing: int | None = None
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
        if self._is_woken:
            return
        self._is_woken = True
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
        try:
            client = self._make_client(self._context())  # read again each time: a renewed certificate has the old name
        except TransportError as error:
            self.last_error = str(error)
            return
        try:
            client.connect(self._config.host, self._config.port, self._config.keepalive_s)
            self._reached = True
            self._serve(client)
        except OSError as error:
            self.last_error = explain_failure(self._config, error)
        except Exception as error:  # noqa: BLE001 - the run loop: broken bytes from a broker must not end the transport
            _LOG.exception("the MQTT client failed; connecting again")
            self.last_error = f"the broker at {self._config.address} sent something unexpected: {error}"
        finally:
            self._link_down(client)

    def _make_client(self, context: ssl.SSLContext | None) -> paho.Client:
        self.attempts += 1
        self._reached, self._accepted, self._refusal, self._subscribing = False, False, None, None
        v5 = self.protocol == "5"
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._config.identity,
            clean_session=None if v5 else True,
            protocol=MQTTProtocolVersion.MQTTv5 if v5 else MQTTProtocolVersion.MQTTv311,
            reconnect_on_failure=False,
        )
        client.connect_timeout = self._config.connect_timeout_s
        if context is not None:
            client.tls_set_context(context)
        if self._will is not None:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=self._will.retain)
        client.on_socket_open = send_at_once
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_publish = self._published
        client.on_message = self._arrived
        client.on_disconnect = self._disconnected
        return client

    def _serve(self, client: paho.Client) -> None:
        """Turn the client's wheel until the link is gone or the transport closes."""
        close_at: float | None = None
        answer_by = time.monotonic() + ANSWER_FACTOR * self._config.connect_timeout_s
        while (sock := client.socket()) is not None:
            if self._closing.is_set():
                close_at = close_at or time.monotonic() + (DRAIN_S if self._up else 0.0)
                if time.monotonic() >= close_at or not (self._outgoing or client.want_write()):
                    client.disconnect()
                    return
            elif self._anew.is_set():
                self.last_error = f"connecting anew to the broker at {self._config.address}"
                client.disconnect()
                return
            elif not self._accepted and time.monotonic() >= answer_by:
                client.disconnect()
                self.last_error = f"the broker at {self._config.address} does not answer"
                return
            self._hand_over(client)
            if self._step(client, sock, TICK_MS if close_at is None else TICK_MS // 10) is not OK:
                return

    def _step(self, client: paho.Client, sock: Any, wait_ms: int) -> MQTTErrorCode:
        poll = select.poll()
        poll.register(sock, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        poll.register(self._wake_out, select.POLLIN)
        ready = dict(poll.poll(0 if _buffered(sock) else wait_ms))
        if self._wake_out.fileno() in ready:
            self._wake_out.recv(65_536)
            self._is_woken = False  # before the queue is looked at: who comes later wakes again
        status = OK
        if ready.get(sock.fileno(), 0) & ~select.POLLOUT or _buffered(sock):
            status = client.loop_read()
        if status is OK and client.want_write():
            status = client.loop_write()
        return client.loop_misc() if status is OK else status

    def _hand_over(self, client: paho.Client) -> None:
        """Give paho what it can send at once; everything else stays in our bounded queue."""
        if self._accepted:
            with self._lock:
                filters, self._new_filters = self._new_filters, []
            if filters:
                client.subscribe(filters)
        while self._up and client.socket() is not None and not client.want_write():
            message = self._outgoing.take(self._in_flight)
            if message is None:
                return
            info = client.publish(message.topic, message.payload, message.qos, message.retain)
            if message.qos > 0:
                self._outgoing.sent(info.mid, message)

    def _connected(
        self, client: paho.Client, _data: Any, _flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._refusal = explain_refusal(self._config, str(reason))
            return
        self._accepted = True
        unstated = PROTOCOL_MAX_PACKET if self.protocol == "5" else self._config.assumed_max_packet
        told = getattr(properties, "MaximumPacketSize", unstated)
        self._max_payload = min(told, self._config.max_packet) - HEADER_BYTES
        self._in_flight = min(self._config.in_flight, getattr(properties, "ReceiveMaximum", self._config.in_flight))
        with self._lock:
            filters, self._new_filters = list(self._filters.items()), []
        if filters:
            self._subscribing = client.subscribe(filters)[1]
        else:
            self._link_up()

    def _subscribed(self, _client: Any, _data: Any, mid: int, reasons: list[ReasonCode], _properties: Any) -> None:
        refused = [str(reason) for reason in reasons if reason.is_failure]
        if refused:
            _LOG.error("the broker at %s refused %d subscriptions: %s", self._config.address, len(refused), refused[0])
        if mid == self._subscribing:
            self._subscribing = None
            self._link_up()

    def _published(self, _client: Any, _data: Any, mid: int, reason: ReasonCode, _properties: Any) -> None:
        message = self._outgoing.acknowledged(mid)
        if message is not None and reason.is_failure:
            _LOG.error("the broker at %s refused a publish on %s: %s", self._config.address, message.topic, reason)

    def _arrived(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        call_out(self._on_delivery, Delivery(message.topic, bytes(message.payload), message.retain))

    def _disconnected(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if self._refusal is not None:
            self.last_error = self._refusal
        elif not self._accepted:
            self.last_error = explain_silence(self._config, str(reason))
        else:
            self.last_error = f"the link to the broker at {self._config.address} broke: {reason}"

    def _link_up(self) -> None:
        self.last_error = None
        self._up = True
        call_out(self._on_link, argument=True)

    def _link_down(self, client: paho.Client) -> None:
        was_up, self._up = self._up, False
        sock = client.socket()
        if sock is not None:
            sock.close()
        self._outgoing.link_lost()
        if self._reached and not self._accepted:
            self._versions.reverse()
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


def send_at_once(_client: Any, _data: Any, sock: Any) -> None:
    """Turn off Nagle's algorithm: a grant that waits for a delayed ACK stalls a whole window."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _buffered(sock: Any) -> bool:
    """Whether TLS holds decrypted bytes that no poll will announce."""
    return isinstance(sock, ssl.SSLSocket) and sock.fileno() >= 0 and sock.pending() > 0
