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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedcg.wire.errors import TransportError
from fedcg.wire.mqtt_config import MqttConfig, TlsFiles, explain_failure, explain_refusal, explain_silence
from fedcg.wire.transport import Delivery, OnDelivery, OnLink, Will, call_out

__all__ = ["MqttConfig", "MqttTransport", "TlsFiles", "probe"]

_LOG = logging.getLogger(__name__)
BACKOFF_FIRST_S = 0.2
BACKOFF_CAP_S = 30.0
STEADY_S = 5.0  # a link that stood so long starts the backoff anew
DRAIN_S = 2.0  # how long `close` lets queued messages leave
IN_FLIGHT = 20  # unacknowledged QoS 1 publishes; Mosquitto's own default bound
HEADER_BYTES = 512  # fixed header, topic (at most 170 bytes for us), properties
PROTOCOL_MAX_PACKET = 268_435_455
MAX_SENDS = 3  # a QoS 1 publish that three links broke under is given up: it may be what breaks them


@dataclass
class _Outgoing:
    topic: str
    payload: bytes
    qos: int
    retain: bool
    sends: int = 0


def backoff_s(failures: int, rng: random.Random) -> float:
    """Seconds to wait after so many failures in a row: doubling from 0.2 s to 30 s, with half of it as jitter."""
    ceiling = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2.0 ** min(failures, 16))
    return ceiling * (0.5 + 0.5 * rng.random())


class MqttTransport:
    """A client of an MQTT broker that keeps itself connected.

    Args:
        config: the broker and who we are on it.
        will: what the broker says when we vanish.
        rng: jitter of the backoff.
    """

    def __init__(self, config: MqttConfig, will: Will | None = None, rng: random.Random | None = None) -> None:
        self._config = config
        self._will = will
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._outgoing: deque[_Outgoing] = deque()
        self._unacked: dict[int, _Outgoing] = {}
        self._queued_bytes = 0
        self._filters: dict[str, int] = {}
        self._new_filters: list[tuple[str, int]] = []
        self._closing = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread: threading.Thread | None = None
        self._up = False
        self._accepted = False
        self._refusal: str | None = None
        self._in_flight = IN_FLIGHT
        self._subscribing: int | None = None
        self._versions = ["3.1.1", "5"] if config.protocol == "auto" else [config.protocol]
        self._max_payload = config.assumed_max_packet - HEADER_BYTES
        self._on_delivery: OnDelivery = _nobody
        self._on_link: OnLink = _nobody
        self.last_error: str | None = None

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect in the background and keep connecting until `close`.

        Raises:
            TransportError: started twice, or TLS files that can't be used.
        """
        if self._thread is not None:
            raise TransportError("the transport was started twice")
        context = None if self._config.tls is None else self._config.tls.context()
        self._on_delivery, self._on_link = on_delivery, on_link
        self._thread = threading.Thread(
            target=self._run, args=(context,), name=f"mqtt-{self._config.identity}", daemon=True
        )
        self._thread.start()

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Ask for a topic filter, now and after every reconnect."""
        with self._lock:
            self._filters[topic] = qos
            if self._up:
                self._new_filters.append((topic, qos))
        self._wake()

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Queue bytes for the broker.

        Raises:
            TransportError: not connected, the outgoing queue is full, or the payload is over `max_payload`.
        """
        if len(payload) > self._max_payload:
            raise TransportError(f"a payload of {len(payload)} bytes; the broker at {self._config.address} takes {self._max_payload}")
        with self._lock:
            if not self._up:
                raise TransportError(self.last_error or f"not connected to the broker at {self._config.address}")
            waiting = len(self._outgoing) + len(self._unacked)
            if waiting >= self._config.queue_max or self._queued_bytes + len(payload) > self._config.queue_max_bytes:
                raise TransportError(
                    f"the queue to the broker at {self._config.address} is full ({waiting} messages, "
                    f"{self._queued_bytes} bytes): the link is slower than what is sent"
                )
            self._outgoing.append(_Outgoing(topic, payload, qos, retain))
            self._queued_bytes += len(payload)
        self._wake()

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes: the broker's maximum packet, or the assumed one, minus the header."""
        return self._max_payload

    @property
    def protocol(self) -> str:
        """The protocol version in use, or tried next."""
        return self._versions[-1]

    def close(self) -> None:
        """Let queued messages leave for a moment, disconnect without triggering the will, stop the thread."""
        self._closing.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(self._config.connect_timeout_s + self._config.keepalive_s + DRAIN_S)
            self._thread = None
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except OSError:
            return  # full: it will wake anyway; closed: nobody is left to wake

    def _run(self, context: ssl.SSLContext | None) -> None:
        failures = 0
        while not self._closing.is_set():
            client = self._make_client(context)
            began = time.monotonic()
            try:
                client.connect(self._config.host, self._config.port, self._config.keepalive_s)
                self._serve(client)
            except OSError as error:
                self.last_error = explain_failure(self._config, error)
            except Exception as error:  # the run loop: a broker's broken bytes must not end the transport
                _LOG.exception("the MQTT client failed; connecting again")
                self.last_error = f"the broker at {self._config.address} sent something unexpected: {error}"
            finally:
                self._link_lost(client)
            if self._closing.is_set():
                return
            failures = 0 if self._accepted and time.monotonic() - began > STEADY_S else failures + 1
            delay = backoff_s(failures - 1, self._rng) if failures else 0.0
            _LOG.warning("%s; trying again in %.1f s", self.last_error, delay)
            self._closing.wait(delay)

    def _make_client(self, context: ssl.SSLContext | None) -> paho.Client:
        self._accepted, self._refusal, self._subscribing = False, None, None
        v5 = self._versions[-1] == "5"
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
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_publish = self._published
        client.on_message = self._arrived
        client.on_disconnect = self._disconnected
        return client

    def _serve(self, client: paho.Client) -> None:
        """Turn the client's wheel until the link is gone or the transport closes."""
        close_at: float | None = None
        while (sock := client.socket()) is not None:
            if self._closing.is_set():
                close_at = close_at or time.monotonic() + (DRAIN_S if self._up else 0.0)
                if time.monotonic() >= close_at or not (self._outgoing or self._unacked or client.want_write()):
                    client.disconnect()
                    return
            self._hand_over(client)
            if self._step(client, sock) is not MQTTErrorCode.MQTT_ERR_SUCCESS:
                return

    def _step(self, client: paho.Client, sock: Any) -> MQTTErrorCode:
        poll = select.poll()
        poll.register(sock, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        poll.register(self._wake_out, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0 if _pending(sock) else 200)}
        if self._wake_out.fileno() in ready:
            self._wake_out.recv(65_536)
        status = MQTTErrorCode.MQTT_ERR_SUCCESS
        if sock.fileno() in ready or _pending(sock):
            status = client.loop_read()
            if status is MQTTErrorCode.MQTT_ERR_SUCCESS and client.want_write():
                status = client.loop_write()
        return status or client.loop_misc()

    def _hand_over(self, client: paho.Client) -> None:
        """Give paho what it can send at once; everything else stays in our bounded queue."""
        with self._lock:
            filters, self._new_filters = self._new_filters, []
        if filters:
            client.subscribe(filters)
        while self._up and client.socket() is not None and not client.want_write():
            with self._lock:
                if not self._outgoing or (self._outgoing[0].qos > 0 and len(self._unacked) >= self._in_flight):
                    return
                message = self._outgoing.popleft()
                if message.qos == 0:
                    self._queued_bytes -= len(message.payload)
            message.sends += 1
            info = client.publish(message.topic, message.payload, message.qos, message.retain)
            if message.qos > 0:
                with self._lock:
                    self._unacked[info.mid] = message

    def _connected(
        self, client: paho.Client, _data: Any, _flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._refusal = explain_refusal(self._config, str(reason))
            return
        self._accepted = True
        v5 = self._versions[-1] == "5"
        assumed = PROTOCOL_MAX_PACKET if v5 else self._config.assumed_max_packet
        self._max_payload = getattr(properties, "MaximumPacketSize", assumed) - HEADER_BYTES
        self._in_flight = min(IN_FLIGHT, getattr(properties, "ReceiveMaximum", IN_FLIGHT))
        with self._lock:
            filters, self._new_filters = list(self._filters.items()), []
        if filters:
            self._subscribing = client.subscribe(filters)[1]
        else:
            self._link_up()

    def _subscribed(self, _client: paho.Client, _data: Any, mid: int, reasons: list[ReasonCode], _properties: Any) -> None:
        refused = [str(reason) for reason in reasons if reason.is_failure]
        if refused:
            _LOG.error("the broker at %s refused %d subscriptions: %s", self._config.address, len(refused), refused[0])
        if mid == self._subscribing:
            self._subscribing = None
            self._link_up()

    def _published(self, _client: paho.Client, _data: Any, mid: int, reason: ReasonCode, _properties: Any) -> None:
        with self._lock:
            message = self._unacked.pop(mid, None)
            if message is not None:
                self._queued_bytes -= len(message.payload)
        if message is not None and reason.is_failure:
            _LOG.error("the broker at %s refused a publish on %s: %s", self._config.address, message.topic, reason)

    def _arrived(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        call_out(self._on_delivery, Delivery(message.topic, bytes(message.payload), message.retain))

    def _disconnected(self, _client: paho.Client, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if self._refusal is not None:
            self.last_error = self._refusal
        elif not self._accepted:
            self.last_error = explain_silence(self._config, str(reason))
        else:
            self.last_error = f"the link to the broker at {self._config.address} broke: {reason}"

    def _link_up(self) -> None:
        with self._lock:
            self._up = True
            # Filters that were added since the batch that was just granted went out.
            self.last_error = None
        call_out(self._on_link, True)

    def _link_lost(self, client: paho.Client) -> None:
        sock = client.socket()
        if sock is not None:
            sock.close()
        with self._lock:
            was_up, self._up = self._up, False
            waiting = [*self._unacked.values(), *self._outgoing]
            self._unacked.clear()
            self._outgoing = deque(message for message in waiting if message.qos > 0 and message.sends < MAX_SENDS)
            self._queued_bytes = sum(len(message.payload) for message in self._outgoing)
            if not self._accepted and self._refused_version():
                self._versions.reverse()
        if was_up and not self._closing.is_set():
            call_out(self._on_link, False)
