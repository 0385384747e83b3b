"""The event log as a feed: positions that survive reconnecting and rotation, and the last events that match a filter."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 256 * 1024
"""At most so many bytes are read for one answer."""
NEAR_BYTES = 64 * 1024
"""The end of the log, which mostly has enough of them."""
SEARCHED_BYTES = 4 * 1024 * 1024
"""So far back a filter looks from the end of the log."""
_POSITION = re.compile(r"^(\d{1,20})-(\d{1,20})$")

Event = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """A place between two lines of the log: the inode of its file and an offset in bytes."""

    inode: int
    offset: int

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"

    @staticmethod
    def parse(text: str) -> Position | None:
        """The position that `str` wrote; None for any other text."""
        found = _POSITION.match(text)
        return None if found is None else Position(int(found[1]), int(found[2]))


class EventFeed:
    """Reads the event log from a position on. Blocking, and short; holds no file open.

    Args:
        path: of the log; the file before the last rotation has the suffix `.old.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._older = path.with_suffix(".old.jsonl")

    def end(self) -> Position:
        """The end of the log now."""
        found = _stat(self._path)
        return Position(0, 0) if found is None else Position(found.st_ino, found.st_size)

    def read(self, position: Position) -> tuple[list[tuple[Position, Event]], Position]:
        """The events after a position.

        Args:
            position: where to start; one in a file that is gone starts with the oldest event that is left.

        Returns:
            Events, each with the position after it, and where to go on; at most `READ_BYTES` of the log.
        """
        current = _stat(self._path)
        if current is None:
            return [], position
        if position.inode == current.st_ino and position.offset <= current.st_size:
            return self._lines(self._path, position, current.st_size)
        older = _stat(self._older)
        if older is not None and position.offset <= older.st_size:
            start = position if position.inode == older.st_ino else Position(older.st_ino, 0)
            if start.offset < older.st_size:
                return self._lines(self._older, start, older.st_size)
        return self._lines(self._path, Position(current.st_ino, 0), current.st_size)

    def _lines(self, path: Path, position: Position, size: int) -> tuple[list[tuple[Position, Event]], Position]:
        if size <= position.offset:
            return [], position
        with path.open("rb") as log:
            if os.fstat(log.fileno()).st_ino != position.inode:
                return [], position  # rotated a moment ago; the next call sees it
            log.seek(position.offset)
            data = log.read(READ_BYTES)
        found, offset = [], position.offset
        whole, newline, torn = data.rpartition(b"\n")
        if not newline:  # a torn line that is longer than a read is left out
            return [], Position(position.inode, offset + len(data)) if len(data) == READ_BYTES else position
        for line in whole.split(b"\n"):
            offset += len(line) + 1
            event = _parsed(line)
            if event is not None:
                found.append((Position(position.inode, offset), event))
        return found, Position(position.inode, position.offset + len(data) - len(torn))


@dataclass(frozen=True)
class EventFilter:
    """Which events a view shows; an empty field fits every event.

    Attributes:
        text: occurs in the event's line, in small or capital letters.
    """

    event: str = ""
    client: str = ""
    federation: str = ""
    text: str = ""

    def fits(self, event: Event) -> bool:
        """Whether a view with this filter shows the event."""
        named = (("event", self.event), ("client", self.client), ("federation", self.federation))
        if any(wanted and event.get(name) != wanted for name, wanted in named):
            return False
        return not self.text or self.text.lower() in json.dumps(event).lower()


def last_events(path: Path, wanted: EventFilter, limit: int) -> list[Event]:
    """The last events that fit, newest first; looks `SEARCHED_BYTES` back at most, over a rotation as well."""
    recent = _last(path, wanted, limit, NEAR_BYTES)
    return recent if len(recent) == limit else _last(path, wanted, limit, SEARCHED_BYTES)


def _last(path: Path, wanted: EventFilter, limit: int, budget: int) -> list[Event]:
    found: list[Event] = []
    for file in (path, path.with_suffix(".old.jsonl")):
        data = _tail(file, budget)
        budget -= len(data)
        for event in _backwards(data):
            if wanted.fits(event):
                found.append(event)
            if len(found) == limit:
                return found
    return found


def _tail(path: Path, limit: int) -> bytes:
    """The last whole lines of a file."""
    size = getattr(_stat(path), "st_size", 0)
    if limit <= 0 or size == 0:
        return b""
    with path.open("rb") as log:
        log.seek(max(0, size - limit))
        data = log.read(limit)
    return data if size <= limit else data.partition(b"\n")[2]


def _backwards(data: bytes) -> Iterator[Event]:
    for line in reversed(data.split(b"\n")):
        event = _parsed(line)
        if event is not None:
            yield event


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
