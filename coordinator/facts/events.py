"""The event log and the audit log in pages, and the events' sentences: backwards from the end, or on from where a reader stopped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedcg.log.sentences import LEVELS, Sentence, sentence_of

NEAR_BYTES = 64 << 10
"""The end of a log, which mostly has enough lines."""
FAR_BYTES = 4 << 20
"""At most so far back a page reads; one of a rare event may hold fewer lines than asked for, with a cursor that goes on."""
ON_BYTES = 256 << 10
"""At most so much a page reads on from a cursor."""
OLDEST = ""
"""The cursor of the oldest line that is left."""
_CURSOR = re.compile(r"(?P<file>[0-9a-f]{1,16})\.(?P<offset>[0-9a-f]{1,16})")

Event = dict[str, Any]
Matches = Callable[[Event], bool]


class CursorError(ValueError):
    """A cursor that is none, or that names a log file which is gone."""


@dataclass(frozen=True)
class LogPage:
    """Lines of a log.

    Attributes:
        lines: oldest first, each with the cursor of the lines after it.
        older: cursor of the lines before them; None where there are none.
        newer: cursor of the lines after them, also when there are none yet; None where there is no log yet.
    """

    lines: list[tuple[str, Event]]
    older: str | None
    newer: str | None

    @property
    def events(self) -> list[Event]:
        """The lines without their cursors."""
        return [event for _, event in self.lines]


@dataclass(frozen=True)
class EventFilter:
    """Which events a view shows; an empty field fits every event.

    Attributes:
        text: occurs in the event's line or its sentence, in small or capital letters.
        level: the least one; an event that was asked for by its name is shown at any level.
    """

    event: str = ""
    client: str = ""
    federation: str = ""
    text: str = ""
    level: str = ""

    def fits(self, event: Event) -> bool:
        """Whether a view with this filter shows the event."""
        named = (("event", self.event), ("client", self.client), ("federation", self.federation))
        if any(wanted and event.get(name) != wanted for name, wanted in named):
            return False
        least = 0 if self.event else LEVELS.get(self.level, 0)
        if not least and not self.text:
            return True
        level, sentence = _sentence(event)
        return level >= least and self.text.lower() in f"{sentence} {json.dumps(event)}".lower()


def in_words(event: Event) -> Event:
    """An event with its sentence under `message`, as in the log, and the level of that."""
    level, sentence = _sentence(event)
    return {**event, "level": next(name for name, number in LEVELS.items() if number == level), "message": sentence}


def read_page(
    path: Path, limit: int, matches: Matches, *, before: str | None = None, after: str | None = None
) -> LogPage:
    """Read lines that match.

    Args:
        path: of the log; the file before the last rotation has the suffix `.old.jsonl`.
        limit: at most so many lines.
        matches: which lines.
        before: cursor; the lines before it, else those at the end.
        after: cursor; the lines after it, `OLDEST` for the first ones that are left.

    Raises:
        CursorError: of another file than the log and the one before it, or not a cursor.
    """
    cursor = before if after is None else after
    if not cursor and not path.exists():
        return LogPage([], None, None)
    opened, offset = _place(path, cursor)
    with opened.open("rb") as file:
        if after is None:
            return _backwards(file, path, offset, limit, matches)
        return _forwards(file, path, offset or 0, limit, matches)


def start_of(path: Path, cursor: str) -> str:
    """Where a reader goes on that has this cursor; without one, or with another text, at the end of the log."""
    if _CURSOR.fullmatch(cursor):
        return cursor
    found = _stat(path)
    return OLDEST if found is None else f"{found.st_ino:x}.{found.st_size:x}"


def read_on(path: Path, cursor: str) -> LogPage:
    """The lines after a cursor; one of a file that is gone goes on with the oldest line that is left."""
    try:
        return read_page(path, ON_BYTES, lambda _: True, after=cursor)
    except CursorError:
        return read_page(path, ON_BYTES, lambda _: True, after=OLDEST)


def last_events(path: Path, wanted: EventFilter, limit: int) -> list[Event]:
    """The last events that fit in words, newest first; over one rotation as well."""
    found: list[Event] = []
    before = None
    while len(found) < limit:
        page = read_page(path, limit - len(found), wanted.fits, before=before)
        found += page.events[::-1]
        before = page.older
        if before is None or page.newer is None or before.partition(".")[0] == page.newer.partition(".")[0]:
            break
    return [in_words(event) for event in found]


def _sentence(event: Event) -> Sentence:
    name = str(event.get("event")).replace("_", " ")
    return sentence_of(event) or Sentence(LEVELS["debug"], name)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _older(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")


def _place(path: Path, cursor: str | None) -> tuple[Path, int | None]:
    """The log, or the one before it when the cursor is of that, and the offset; None for the end."""
    if cursor is None:
        return path, None
    if cursor == OLDEST:
        return (_older(path) if _older(path).exists() else path), 0
    found = _CURSOR.fullmatch(cursor)
    for known in (path, _older(path)) if found else ():
        there = _stat(known)
        if found and there is not None and there.st_ino == int(found["file"], 16):
            return known, int(found["offset"], 16)
    raise CursorError("the cursor is not one of this log, or its lines are gone; ask without one")


def _backwards(file: BinaryIO, path: Path, offset: int | None, limit: int, matches: Matches) -> LogPage:
    there = os.fstat(file.fileno())
    end = there.st_size if offset is None else min(offset, there.st_size)
    found: list[tuple[str, Event]] = []
    first = last = end
    for window in (NEAR_BYTES, FAR_BYTES):
        start = max(0, end - window)
        file.seek(start)
        data = file.read(end - start)
        skipped = data.find(b"\n") + 1 if start else 0  # the first line may be a piece
        whole, found = data[skipped : data.rfind(b"\n") + 1], []
        first, last = start + skipped, start + skipped + len(whole)
        at = last
        for line in reversed(whole.splitlines(keepends=True)):
            if (event := _event(line)) is not None and matches(event):
                found.append((f"{there.st_ino:x}.{at:x}", event))
            at -= len(line)
            if len(found) == limit:
                first = at
                break
        if len(found) == limit or not start:
            break
    older = f"{there.st_ino:x}.{first:x}" if first > 0 else _end_before(path, there.st_ino)
    return LogPage(found[::-1], older, f"{there.st_ino:x}.{last:x}")


def _end_before(path: Path, inode: int) -> str | None:
    """The cursor of the end of the file before the one with this inode; None where there is none."""
    before = _stat(_older(path))
    return None if before is None or before.st_ino == inode else f"{before.st_ino:x}.{before.st_size:x}"


def _forwards(file: BinaryIO, path: Path, start: int, limit: int, matches: Matches) -> LogPage:
    there = os.fstat(file.fileno())
    file.seek(start)
    data = file.read(ON_BYTES)
    found, at = [], start
    for line in _whole(data):
        at += len(line)
        if (event := _event(line)) is not None and matches(event):
            found.append((f"{there.st_ino:x}.{at:x}", event))
        if len(found) == limit:
            break
    current = path.stat().st_ino
    is_over = current != there.st_ino and at >= there.st_size  # the log was rotated, and its old file is read
    older = f"{there.st_ino:x}.{start:x}" if start > 0 else _end_before(path, there.st_ino)
    return LogPage(found, older, f"{current:x}.0" if is_over else f"{there.st_ino:x}.{at:x}")


def _whole(data: bytes) -> Iterator[bytes]:
    """The whole lines at the start of a block; a torn line that is longer than a block passes as one."""
    end = data.rfind(b"\n") + 1
    yield from (data[:end] or (data if len(data) == ON_BYTES else b"")).splitlines(keepends=True)


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
