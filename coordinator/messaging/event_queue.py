"""The one queue of the service: any thread puts, the service's loop takes. Items from the network are bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_BYTES = 64 * 1024 * 1024
SENDER_BYTES = 1024 * 1024
ITEM_BYTES = 4096
"""Every item takes at least so many: a sender has at most 256 of them waiting, and all together 16,384."""

Item = TypeVar("Item")


@dataclass
class _Queue(Generic[Item]):
    items: deque[tuple[Item, int]] = field(default_factory=deque)
    bytes: int = 0


class EventQueue(Generic[Item]):
    """The service's own items first, then the senders in turns, each one's items in order.

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
