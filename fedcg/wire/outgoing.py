"""What waits to leave over a link: bounded in messages and bytes, in order, until it is sent or acknowledged.

Knows nothing of MQTT libraries; safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from fedcg.wire.errors import TransportError
from fedcg.wire.transport import Backlog

MAX_PACKET_ID = 0x7FFF  # those above are for subscriptions
MAX_SENDS = 3  # a QoS 1 publish under which three links broke is given up: it may be what breaks them


@dataclass
class Outgoing:
    """One publish.

    Attributes:
        packet: its packet id on the present link; 0 at QoS 0.
        sends: how often it was handed to a link.
        is_under_way: it waits here for the link, or for the broker's acknowledgement.
    """

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet: int = 0
    sends: int = 0
    is_under_way: bool = True


class OutgoingQueue:
    """Publishes that are queued, and QoS 1 publishes that are sent and not acknowledged."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._unacked: dict[int, Outgoing] = {}
        self._bytes = 0
        self._last_packet = 0
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
            TransportError: a bound would be passed.
        """
        with self._lock:
            waiting = len(self._queue) + len(self._unacked)
            if waiting >= self._max_messages or self._bytes + len(message.payload) > self._max_bytes:
                raise TransportError(
                    f"the outgoing queue is full ({waiting} messages, {self._bytes} bytes): the link is slower than what is "
                    "sent; wait and try again"
                )
            self._queue.append(message)
            self._bytes += len(message.payload)

    def take(self, in_flight: int) -> Outgoing | None:
        """The next publish to send, or None; a QoS 1 publish waits while `in_flight` of them are not acknowledged.

        It gets a packet id and is remembered under it until `acknowledged`.
        """
        with self._lock:
            if not self._queue or (self._queue[0].qos > 0 and len(self._unacked) >= in_flight):
                return None
            message = self._queue.popleft()
            message.sends += 1
            if message.qos == 0:
                self._bytes -= len(message.payload)
                message.is_under_way = False
                return message
            while True:
                self._last_packet = self._last_packet % MAX_PACKET_ID + 1
                if self._last_packet not in self._unacked:
                    break
            message.packet = self._last_packet
            if not self._unacked:
                self._owed_since = time.monotonic()
            self._unacked[message.packet] = message
            return message

    def acknowledged(self, packet: int) -> Outgoing | None:
        """Forget a QoS 1 publish that the broker has; None for an unknown packet id."""
        with self._lock:
            message = self._unacked.pop(packet, None)
            if message is not None:
                self._bytes -= len(message.payload)
                message.is_under_way = False
                self._owed_since = time.monotonic()
            return message

    def owed_s(self) -> float:
        """Seconds since the broker acknowledged anything; 0 while it owes nothing."""
        with self._lock:
            return time.monotonic() - self._owed_since if self._unacked else 0.0

    def link_lost(self) -> None:
        """Queue again, in order, what was QoS 1 and not acknowledged; drop what was QoS 0."""
        with self._lock:
            waiting = [*self._unacked.values(), *self._queue]
            self._unacked.clear()
            for message in waiting:
                message.is_under_way = message.qos > 0 and message.sends < MAX_SENDS
            self._queue = deque(message for message in waiting if message.is_under_way)
            self._bytes = sum(len(message.payload) for message in self._queue)
