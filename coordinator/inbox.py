"""The one queue of the service: threads put, the event loop takes. Bounded in items and bytes for what the network brings."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

MAX_ITEMS = 20_000
MAX_BYTES = 64 * 1024 * 1024

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """First in, first out. What does not fit is dropped and counted: every sender repeats what was not answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._waiting: asyncio.Future[None] | None = None
        self.dropped = 0

    def put(self, item: Item, size: int = 0) -> None:
        """Add an item from any thread. Items of size 0 (our own) are never dropped.

        Args:
            item: what to add.
            size: bytes it holds.
        """
        with self._lock:
            if size and (len(self._items) >= MAX_ITEMS or self._bytes + size > MAX_BYTES):
                self.dropped += 1
                return
            self._items.append((item, size))
            self._bytes += size
            wake = len(self._items) == 1
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    async def get(self, timeout_s: float) -> Item | None:
        """The next item, or None when none came in time."""
        if not self._items:
            self._waiting = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._waiting  # who puts something from now on calls `_wake` after this
            finally:
                self._waiting = None
                timer.cancel()
        with self._lock:
            if not self._items:
                return None
            item, size = self._items.popleft()
            self._bytes -= size
        return item

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
