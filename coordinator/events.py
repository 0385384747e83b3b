"""The coordinator's diary: an append-only file of JSON lines that people and the demo follow. It decides nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

EventValue = str | int | float | bool | None | list[str] | dict[str, int]


class EventLog:
    """Appends `{"t": unix time, "event": name, ...}` lines; safe to call from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, event: str, **values: EventValue) -> None:
        """Append one line; whoever reads the file sees it at once."""
        line = json.dumps({"t": self._clock(), "event": event, **values}, separators=(",", ":"))
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._file.close()
