"""A broker and its transports in one process: the same laws as MQTT, without a network.

The contract suite holds it to the laws of `fedcg.wire.transport.transport`; `MemoryBroker.drop` cuts a client's link,
like a radio that fails.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paho.mqtt.client import topic_matches_sub

from fedcg.wire.errors import TransportError
from fedcg.wire.transport.transport import Backlog, Delivery, OnDelivery, OnLink, Publication, Will, call_out

Action = Literal["publish", "read"]
Rules = Callable[[str, Action, str], bool]
QUEUE_MAX = 65_536
Record = Callable[[str, str, bytes], None]


class MemoryBroker:
    """Routes between the transports of one process.

    Args:
        rules: whether an identity may publish on, or read from, a topic; only the publisher learns of a refusal.

    Attributes:
        record: called with (identity, topic, payload) for every accepted publish, including wills.
        max_payload: the largest accepted payload.
    """

    def __init__(self, rules: Rules = lambda _identity, _action, _topic: True) -> None:
        self.record: Record | None = None
        self.max_payload = 1_900_000
        self._rules = rules
        self._lock = threading.RLock()
        self._sessions: dict[str, MemoryTransport] = {}
        self._down: dict[str, MemoryTransport] = {}
        self._retained: dict[str, bytes] = {}

    def drop(self, identity: str) -> None:
        """Cut a client's link: its will is published, and it stays offline until `restore`."""
        with self._lock:
            transport = self._sessions.pop(identity, None)
            if transport is None:
                return
            self._down[identity] = transport
            transport.link_changed(up=False)
            self._publish_will(transport)

    def restore(self, identity: str) -> None:
        """Restore a dropped client's link and its subscriptions."""
        with self._lock:
            transport = self._down.pop(identity, None)
            if transport is not None:
                self.attach(transport)

    def attach(self, transport: MemoryTransport) -> None:
        """Connect a transport; a client with the same identity is disconnected, as MQTT requires."""
        with self._lock:
            if transport.identity in self._sessions:
                self.drop(transport.identity)
            self._sessions[transport.identity] = transport
            for topic_filter in transport.filters:
                self.send_retained(transport, topic_filter)
            transport.link_changed(up=True)

    def detach(self, transport: MemoryTransport) -> None:
        """Disconnect a transport permanently, without its will."""
        with self._lock:
            for table in (self._sessions, self._down):
                if table.get(transport.identity) is transport:
                    del table[transport.identity]

    def is_attached(self, transport: MemoryTransport) -> bool:
        """Return whether this transport is connected."""
        with self._lock:
            return self._sessions.get(transport.identity) is transport

    def route(self, identity: str, topic: str, payload: bytes, *, retain: bool) -> bool:
        """Deliver a publish to every connected client that subscribed to the topic and may read it; return whether it is accepted."""
        with self._lock:
            if not self._rules(identity, "publish", topic):
                return False
            if self.record is not None:
                self.record(identity, topic, payload)
            if retain and payload:
                self._retained[topic] = payload
            elif retain:
                self._retained.pop(topic, None)
            for transport in list(self._sessions.values()):
                wanted = any(topic_matches_sub(topic_filter, topic) for topic_filter in transport.filters)
                if wanted and self._rules(transport.identity, "read", topic):
                    transport.enqueue(Delivery(topic, payload, retained=False))
        return True

    def send_retained(self, transport: MemoryTransport, topic_filter: str) -> None:
        """Give a client the retained messages under a filter."""
        with self._lock:
            for topic, payload in sorted(self._retained.items()):
                if topic_matches_sub(topic_filter, topic) and self._rules(transport.identity, "read", topic):
                    transport.enqueue(Delivery(topic, payload, retained=True))

    def _publish_will(self, transport: MemoryTransport) -> None:
        if transport.will is not None:
            self.route(transport.identity, transport.will.topic, transport.will.payload, retain=transport.will.retain)


@dataclass(frozen=True)
class _Link:
    up: bool


@dataclass(frozen=True)
class _Routed:
    is_under_way: bool = False


_ROUTED = _Routed()


class MemoryTransport:
    """A client of a `MemoryBroker`; its callbacks run on its own thread."""

    def __init__(self, broker: MemoryBroker, identity: str, will: Will | None = None) -> None:
        self.identity = identity
        self.will = will
        self.filters: list[str] = []
        self.is_refused = False
        self._broker = broker
        self._inbox: queue.Queue[Delivery | _Link | None] = queue.Queue(QUEUE_MAX)
        self._thread: threading.Thread | None = None

    def start(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        """Connect and start delivery."""
        if self._thread is not None:
            raise TransportError(f"the transport of {self.identity} was started twice")
        self._thread = threading.Thread(
            target=self._deliver, args=(on_delivery, on_link), name=f"memory-{self.identity}", daemon=True
        )
        self._thread.start()
        self._broker.attach(self)

    def subscribe(self, topic: str, qos: int = 1) -> None:
        """Subscribe to a topic filter, now and after every reconnect."""
        if topic not in self.filters:
            self.filters.append(topic)
        if self._broker.is_attached(self):
            self._broker.send_retained(self, topic)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Publication:
        """Hand bytes to the broker.

        Raises:
            TransportError: not connected, or over `max_payload`.
        """
        if len(payload) > self.max_payload:
            raise TransportError(f"a payload of {len(payload)} bytes; this link takes {self.max_payload}")
        if not self._broker.is_attached(self):
            raise TransportError(f"{self.identity} is not connected")
        self.is_refused = not self._broker.route(self.identity, topic, payload, retain=retain)
        return _ROUTED

    def change_will(self, will: Will) -> None:
        """Replace the will; this reconnects, without triggering the old one."""
        self.will = will
        if self._broker.is_attached(self):
            self._broker.detach(self)
            self.link_changed(up=False)
            self._broker.attach(self)

    def be_patient(self, retry_s: float) -> None:
        """Drop the link for the rest of the test; 0 changes nothing."""
        if retry_s and self._broker.is_attached(self):
            self._broker.detach(self)
            self.link_changed(up=False)

    @property
    def backlog(self) -> Backlog:
        """Do nothing: the broker has a publish when `publish` returns."""
        return Backlog()

    @property
    def max_payload(self) -> int:
        """The largest payload in bytes that the broker accepts."""
        return self._broker.max_payload

    def close(self) -> None:
        """Disconnect without the will, deliver queued messages, stop the thread."""
        self._broker.detach(self)
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def enqueue(self, delivery: Delivery) -> None:
        """Receive a message from the broker.

        Raises:
            TransportError: the client's callback has not kept up with a whole queue of messages.
        """
        try:
            self._inbox.put_nowait(delivery)
        except queue.Full as error:
            raise TransportError(f"{self.identity} does not read: {QUEUE_MAX} messages wait for it") from error

    def link_changed(self, *, up: bool) -> None:
        """Receive from the broker that the link was established or lost."""
        self._inbox.put(_Link(up))

    def _deliver(self, on_delivery: OnDelivery, on_link: OnLink) -> None:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, _Link):
                call_out(on_link, item.up)
            else:
                call_out(on_delivery, item)
