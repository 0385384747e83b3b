"""The one queue of the agent: threads put, its loop takes. Bounded by the bytes that wait, of all kinds of items."""

from __future__ import annotations

import queue
from collections import deque

from edge_client.session.events import LinkChanged
from edge_client.training.trainer_handle import TrainerReport
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transport.transport import Delivery

MAX_BYTES = 32 * 1024 * 1024
"""16 times the bytes that a download may have under way: the loop that takes it is 0.25 s late at most, and a box may have 2 GB."""
ITEM_BYTES = 1024  # bytes that an item counts besides its content, so that empty ones are bounded as well


Item = Delivery | LinkChanged | Chunk | TrainerReport


class Inbox(queue.Queue[Item]):
    """A `queue.Queue` whose size is in bytes; a single item may pass the bound, the next one waits or is refused."""

    def __init__(self) -> None:
        super().__init__(MAX_BYTES)

    def _init(self, maxsize: int) -> None:
        self._items: deque[Item] = deque()
        self._bytes = 0

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: Item) -> None:
        self._items.append(item)
        self._bytes += _weight(item)

    def _get(self) -> Item:
        item = self._items.popleft()
        self._bytes -= _weight(item)
        return item


def _weight(item: Item) -> int:
    content = item.payload if isinstance(item, Delivery) else item.data if isinstance(item, Chunk) else b""
    return ITEM_BYTES + len(content)
