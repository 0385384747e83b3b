"""How much a device may send: token buckets that count before a signature is checked or a byte is hashed, and a bounded queue behind them.

A device that stays above what any honest one sends is silenced: the service then takes it off the broker's access list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from coordinator.token_buckets import Buckets
from fedcg.wire.messages.topics import TopicKind

MESSAGES_PER_S = 200.0  # of one device and topic kind; 8 chunks a grant make it 190 MB/s of downloads
MESSAGES_AT_ONCE = 1000.0  # the grants of a download of 900 MB
FLOOD_PER_S = 500.0  # of one device, on all topics, without the chunks that were granted
FLOOD_AT_ONCE = 3000.0  # so that 4,000/s are a flood after one second, and 600/s after 30
SILENCE_S = 600.0
LINES_PER_S = (
    0.5  # in the event log, about one device, of the kinds that it can cause at will; a round every two seconds
)
LINES_AT_ONCE = 200.0
MAX_BYTES = 64 * 1024 * 1024
SENDER_BYTES = 1024 * 1024
ITEM_BYTES = 4096
"""Every item takes at least so many: a sender has at most 256 of them waiting, and all together 16,384."""
LIMITED_EVENTS = frozenset({"accepted", "cohort_differs", "declined", "offline", "online", "update_refused"})

Item = TypeVar("Item")


class LineLimit:
    """Which lines of the event log about a device are written: all, until it causes too many of those that it can repeat."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines: Buckets[str] = Buckets(LINES_PER_S, LINES_AT_ONCE, clock)

    def allows(self, event: str, client: str) -> bool:
        """Whether one more line of this kind about this device may be written."""
        return event not in LIMITED_EVENTS or self._lines.take(client)


class FloodLimits:
    """Decides, on the transport's thread, which messages of a device are processed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._messages: Buckets[tuple[str, TopicKind]] = Buckets(MESSAGES_PER_S, MESSAGES_AT_ONCE, clock)
        self._all: Buckets[str] = Buckets(FLOOD_PER_S, FLOOD_AT_ONCE, clock)
        self._silenced: dict[str, float] = {}

    def admits(self, device: str, kind: TopicKind) -> bool:
        """Whether a message may be processed.

        Args:
            device: the sender; empty for all devices that are not in the register, which share a bucket.
            kind: of its topic.
        """
        if device in self._silenced:
            return False
        if device and not self._all.take(device):
            self._silenced[device] = self._clock() + SILENCE_S
            return False
        return self._messages.take((device, kind))

    def is_silenced(self, device: str) -> bool:
        """Whether messages of a device are ignored now."""
        return device in self._silenced

    def silenced(self) -> frozenset[str]:
        """The devices whose messages are ignored now; from any thread. One whose time is over starts with a full bucket."""
        now = self._clock()
        for device, until in list(self._silenced.items()):
            if now >= until:
                self._all.forget(device)
                del self._silenced[device]
        return frozenset(self._silenced)


@dataclass
class _Queue(Generic[Item]):
    items: deque[tuple[Item, int]] = field(default_factory=deque)
    bytes: int = 0


class EventQueue(Generic[Item]):
    """The one queue of the service: any thread puts, the loop takes. Its own items first, then the senders in turns, each one's in order.

    An item that does not fit, because its sender or all of them have too much waiting, is dropped and counted: every sender repeats
    a message that was not answered.
    """

    def __init__(self) -> None:
        self._own: deque[Item] = deque()
        self._senders: dict[str, _Queue[Item]] = {}  # those with items, the next one first
        self._bytes = 0  # of all senders
        self._filled = threading.Condition()
        self.dropped = 0

    def put(self, item: Item, size: int = 0, sender: str = "") -> None:
        """Add an item. Items of size 0 (the service's own) are never dropped.

        Args:
            item: what to add.
            size: bytes it holds.
            sender: the device that sent it.
        """
        with self._filled:
            if size == 0:
                self._own.append(item)
            elif not self._add(item, size, sender):
                self.dropped += 1
                return
            self._filled.notify()

    def get(self, timeout_s: float) -> Item | None:
        """The next item, or None when none came in time."""
        with self._filled:
            if not self._own and not self._senders:
                self._filled.wait(timeout_s)
            if self._own:
                return self._own.popleft()
            return self._take() if self._senders else None

    def _add(self, item: Item, size: int, sender: str) -> bool:
        queue = self._senders.get(sender) or _Queue()
        size = max(size, ITEM_BYTES)
        if queue.bytes + size > SENDER_BYTES or self._bytes + size > MAX_BYTES:
            return False
        queue.items.append((item, size))
        queue.bytes += size
        self._senders[sender] = queue
        self._bytes += size
        return True

    def _take(self) -> Item:
        sender = next(iter(self._senders))
        queue = self._senders.pop(sender)
        item, size = queue.items.popleft()
        queue.bytes -= size
        if queue.items:
            self._senders[sender] = queue  # behind the others
        self._bytes -= size
        return item
