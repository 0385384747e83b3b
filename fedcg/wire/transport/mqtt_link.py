"""One connection to a broker on paho, with limits for incoming packets, and the bounded queue of waiting messages.

It has no thread and no policy for reconnecting; both are in `mqtt`.

paho's threads and its reconnecting are not used: they resend an oversize publish without end, queue without a limit, and end silently after
an exception in a callback. docs/decisions/013 lists the private names of paho that are used here. The queue is safe to use from several
threads.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fedcg.wire.errors import MalformedError, TransportError
from fedcg.wire.transport.mqtt_config import MqttConfig
from fedcg.wire.transport.transport import Backlog, Will

HANG_UP_S = 0.8  # how long `hang_up` waits for the broker
MAX_UNSENT = 65_536  # packets: one acknowledgement per packet id, and a ping
READ_BYTES = 1 << 18
OK = MQTTErrorCode.MQTT_ERR_SUCCESS


class MqttLink(paho.Client):
    """A connection. One thread opens it, passes messages to it, and calls `move`.

    Args:
        config: the broker.
        context: for TLS; None for plain text.
        protocol: the version to use.
        will: the message that the broker publishes when this side vanishes.

    Attributes:
        is_accepted: whether the broker has answered CONNECT.
    """

    def __init__(self, config: MqttConfig, context: ssl.SSLContext | None, protocol: str, will: Will | None) -> None:
        self._is_5 = protocol == "5"
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=config.client_id,
            clean_session=None if self._is_5 else True,
            protocol=MQTTProtocolVersion.MQTTv5 if self._is_5 else MQTTProtocolVersion.MQTTv311,
            reconnect_on_failure=False,
        )
        self._settings = config
        self._cause = ""
        self._give_up_at = 0.0
        self.is_accepted = False
        self.connect_timeout = config.connect_timeout_s  # also for the TLS handshake
        if context is not None:
            self.tls_set_context(context)
        if will is not None:
            self.will_set(will.topic, will.payload, qos=1, retain=will.retain)
        self.on_socket_open = send_at_once
        self.on_disconnect = self._note_cause

    def open(self) -> None:
        """Connect and send CONNECT.

        Raises:
            OSError: no connection or no handshake in time (`ssl.SSLError` is one).
        """
        properties = Properties(PacketTypes.CONNECT) if self._is_5 else None  # type: ignore[no-untyped-call]
        if properties is not None:
            properties.MaximumPacketSize = self._settings.max_inbound
        self.connect(self._settings.host, self._settings.port, self._settings.keepalive_s, properties=properties)

    def accept_keepalive(self, seconds: int | None) -> None:
        """Use the broker's keepalive if it is shorter; none, or a longer one, would hide a dead link."""
        self._keepalive = min(self._settings.keepalive_s, seconds or self._settings.keepalive_s)

    def move(self, wake: int | None, seconds: float) -> bool:
        """Wait until something can be read or written, and read and write it; call the callbacks.

        Args:
            wake: a descriptor that ends the wait when it can be read; None for none.
            seconds: longest wait.

        Returns:
            Whether `wake` can be read.

        Raises:
            OSError: the connection is broken.
            MalformedError: a packet that a broker may not send; paho raises its own errors for others.
        """
        sock: Any = self.socket()
        if sock is None:
            raise ConnectionError(self._cause or "it is closed")
        holds_more = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0  # poll does not report these bytes
        poll, descriptor = select.poll(), sock.fileno()
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if self.want_write() else 0))
        if wake is not None:
            poll.register(wake, select.POLLIN)
        ready = dict(poll.poll(0.0 if holds_more else 1000.0 * seconds))
        status = OK
        if holds_more or ready.get(descriptor, 0) & ~select.POLLOUT:
            status = self.loop_read()
        if status is OK and self.want_write():
            status = self.loop_write()
        if status is not OK:
            raise ConnectionError(self._cause or paho.error_string(status))
        # paho may close the connection for a missing answer and still return OK
        if self.socket() is not None and (self.loop_misc() is not OK or self.socket() is None):
            raise ConnectionError("a ping was not answered within the keepalive")
        if len(self._out_packet) > MAX_UNSENT:
            raise ConnectionError("it does not read the packets sent to it")
        return wake in ready

    def hang_up(self) -> None:
        """Finish the current packet, send DISCONNECT, and give the broker time to close the connection.

        Closing a connection with unread bytes resets it: the broker may then never read DISCONNECT, and publishes the will.
        """
        self._give_up_at = time.monotonic() + HANG_UP_S
        self.on_socket_close = self._drain  # paho closes as soon as DISCONNECT is sent
        with contextlib.suppress(OSError, MalformedError):
            self.disconnect()
            while self.socket() is not None and (left_s := self._give_up_at - time.monotonic()) > 0:
                self.move(None, left_s)

    def close(self) -> None:
        """Drop the connection."""
        sock = self.socket()
        if sock is not None:
            sock.close()

    def _drain(self, _client: Any, _data: Any, sock: Any) -> None:
        sock.settimeout(HANG_UP_S)
        with contextlib.suppress(OSError):
            while time.monotonic() < self._give_up_at and sock.recv(READ_BYTES):
                pass

    def _note_cause(self, _client: Any, _data: Any, flags: Any, reason: Any, _properties: Any) -> None:
        if flags.is_disconnect_packet_from_server:
            self._cause = f"the broker ended it: {reason}"

    def _sock_recv(self, bufsize: int) -> bytes:
        """Read for paho, which requests the rest of a packet after its type and length, before it allocates memory for it."""
        self._check_header(self._in_packet["command"], bufsize)
        return super()._sock_recv(bufsize)

    def _check_header(self, command: int, size: int) -> None:
        kind = command & 0xF0
        if size > self._settings.max_inbound:
            raise MalformedError(f"a packet of {size} bytes; at most {self._settings.max_inbound} are read")
        if command & 0xF4 == paho.PUBLISH | 0x04:  # paho would keep each one until the broker releases it
            raise MalformedError("a message at QoS 2, which nothing here subscribes to")
        if kind == paho.CONNACK and self.is_accepted:
            raise MalformedError("a second answer to CONNECT")
        if kind not in (0, paho.CONNACK, paho.DISCONNECT) and not self.is_accepted:
            raise MalformedError("a packet before the answer to CONNECT")


def send_at_once(_client: Any, _data: Any, sock: Any) -> None:
    """Turn off Nagle's algorithm: a grant that waits for a delayed ACK stalls a whole window."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


MAX_SENDS = 3  # a QoS 1 publish is dropped after three broken links: it may be the cause


@dataclass(eq=False)
class Outgoing:
    """One publish.

    Attributes:
        sends: how often it was passed to a link.
        is_under_way: it waits for the link or for the broker's acknowledgement.
    """

    topic: str
    payload: bytes
    qos: int
    retain: bool
    sends: int = 0
    is_under_way: bool = True


class OutgoingQueue:
    """Queued publishes, and QoS 1 publishes that are sent and not acknowledged."""

    def __init__(self, max_messages: int = 1000, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._unacked: dict[Outgoing, None] = {}
        self._bytes = 0
        self._owed_since = 0.0

    def __len__(self) -> int:
        """Messages queued or not acknowledged."""
        with self._lock:
            return len(self._queue) + len(self._unacked)

    @property
    def backlog(self) -> Backlog:
        """Messages queued or not acknowledged, and their bytes."""
        with self._lock:
            return Backlog(len(self._queue) + len(self._unacked), self._bytes)

    def put(self, message: Outgoing) -> None:
        """Queue a publish.

        Raises:
            TransportError: a limit would be exceeded.
        """
        with self._lock:
            waiting = len(self._queue) + len(self._unacked)
            if waiting >= self._max_messages or self._bytes + len(message.payload) > self._max_bytes:
                raise TransportError(
                    f"the outgoing queue is full ({waiting} messages, {self._bytes} bytes): the link is too slow; "
                    "wait and try again"
                )
            self._queue.append(message)
            self._bytes += len(message.payload)

    def take(self, in_flight: int) -> Outgoing | None:
        """The next publish to send, or None; a QoS 1 publish waits while `in_flight` of them are not acknowledged."""
        with self._lock:
            if not self._queue or (self._queue[0].qos > 0 and len(self._unacked) >= in_flight):
                return None
            message = self._queue.popleft()
            message.sends += 1
            if message.qos == 0:
                self._bytes -= len(message.payload)
                message.is_under_way = False
                return message
            if not self._unacked:
                self._owed_since = time.monotonic()
            self._unacked[message] = None
            return message

    def acknowledged(self, message: Outgoing) -> None:
        """Forget a QoS 1 publish that the broker acknowledged."""
        with self._lock:
            del self._unacked[message]
            self._bytes -= len(message.payload)
            message.is_under_way = False
            self._owed_since = time.monotonic()

    def owed_s(self) -> float:
        """Seconds since the broker acknowledged anything; 0 while it owes nothing."""
        with self._lock:
            return time.monotonic() - self._owed_since if self._unacked else 0.0

    def link_lost(self) -> None:
        """Queue again, in order, the unacknowledged QoS 1 publishes; drop those of QoS 0."""
        with self._lock:
            waiting = [*self._unacked, *self._queue]
            self._unacked.clear()
            for message in waiting:
                message.is_under_way = message.qos > 0 and message.sends < MAX_SENDS
            self._queue = deque(message for message in waiting if message.is_under_way)
            self._bytes = sum(len(message.payload) for message in self._queue)
