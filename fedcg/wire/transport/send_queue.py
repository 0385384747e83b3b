"""The messages that wait for a link: bounded in messages and bytes, in order, until they are sent or acknowledged.

Knows nothing of MQTT libraries; safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from fedcg.wire.errors import TransportError
from fedcg.wire.transport.transport import Backlog

MAX_SENDS = 3  # a QoS 1 publish under which three links broke is given up: it may be what breaks them


@dataclass(eq=False)
class Outgoing:
    """One publish.

    Attributes:
        sends: how often it was handed to a link.
        is_under_way: it waits here for the link, or for the broker's acknowledgement.
    """

    topic: str
    payload: bytes
    qos: int
    retain: bool
    sends: int = 0
    is_under_way: bool = True


class OutgoingQueue:
    """Publishes that are queued, and QoS 1 publishes that are sent and not acknowledged."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
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
