"""Reads an event log, or the audit log, in pages: from the end backwards, or on from where a reader stopped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW_BYTES = 4 << 20
"""Most bytes that one page reads; a page of a rare event may hold fewer lines than asked for, with a cursor that goes on."""
_CURSOR = re.compile(r"(?P<file>[0-9a-f]{1,16})\.(?P<offset>[0-9a-f]{1,16})")

Event = dict[str, Any]
Matches = Callable[[Event], bool]


class CursorError(ValueError):
    """A cursor that is none, or that names a log file which is gone."""


@dataclass(frozen=True)
class LogPage:
    """Lines of a log.

    Attributes:
        events: oldest first.
        older: cursor of the lines before them; None at the beginning of the file.
        newer: cursor of the lines after them, also when there are none yet; None where there is no log yet.
    """

    events: list[Event]
    older: str | None
    newer: str | None


def read_page(path: Path, limit: int, matches: Matches, *, before: str | None, after: str | None) -> LogPage:
    """Read lines that match.

    Args:
        path: the log.
        limit: at most so many lines.
        matches: which lines.
        before: cursor; the lines before it, else those at the end.
        after: cursor; the lines after it.

    Raises:
        CursorError: of another file than the log and the one before it, or not a cursor.
    """
    cursor = before if after is None else after
    if cursor is None and not path.exists():
        return LogPage([], None, None)
    opened, offset = _place(path, cursor)
    with opened.open("rb") as file:
        known = os.fstat(file.fileno())
        name = f"{known.st_ino:x}"
        if after is None:
            end = known.st_size if offset is None else offset
            start = max(0, end - WINDOW_BYTES)
            file.seek(start)
            events, first, last = _backwards(_lines(file.read(end - start), start), limit, matches, start)
            return LogPage(events, f"{name}.{first:x}" if first > 0 else None, f"{name}.{last:x}")
        start = offset or 0
        file.seek(start)
        events, last = _forwards(_lines(file.read(WINDOW_BYTES), start), limit, matches, start)
    current = path.stat().st_ino
    is_over = current != known.st_ino and last >= known.st_size  # the log was rotated, and its old file is read
    return LogPage(events, cursor if start > 0 else None, f"{current:x}.0" if is_over else f"{name}.{last:x}")


def _place(path: Path, cursor: str | None) -> tuple[Path, int | None]:
    """The log, or the one before it when the cursor is of that, and the offset; None for the end."""
    if cursor is None:
        return path, None
    found = _CURSOR.fullmatch(cursor)
    for known in (path, path.with_suffix(".old.jsonl")) if found else ():
        if found and known.exists() and known.stat().st_ino == int(found["file"], 16):
            return known, int(found["offset"], 16)
    raise CursorError("the cursor is not one of this log, or its lines are gone; ask without one")


def _lines(block: bytes, start: int) -> list[tuple[int, bytes]]:
    """The complete lines of a block with their offsets; the first one may be a piece."""
    at, lines = start, []
    for line in block.splitlines(keepends=True):
        if line.endswith(b"\n"):
            lines.append((at, line))
        at += len(line)
    return lines


def _backwards(
    lines: list[tuple[int, bytes]], limit: int, matches: Matches, start: int
) -> tuple[list[Event], int, int]:
    """The last lines that match, oldest first; where the first line that was read begins, and where the last one ends."""
    whole = lines[1:] if start > 0 else lines
    events: list[Event] = []
    first = start
    for at, line in reversed(whole):
        event = _event(line)
        if event is not None and matches(event):
            events.append(event)
        first = at
        if len(events) == limit:
            break
    last = lines[-1][0] + len(lines[-1][1]) if lines else start
    return events[::-1], first, last


def _forwards(lines: list[tuple[int, bytes]], limit: int, matches: Matches, start: int) -> tuple[list[Event], int]:
    events: list[Event] = []
    last = start
    for at, line in lines:
        event = _event(line)
        if event is not None and matches(event):
            events.append(event)
        last = at + len(line)
        if len(events) == limit:
            break
    return events, last


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
