"""`sent.jsonl`: everything that has left this device in updates and reports about itself, ever; append-only, 0600, never rotated.

A line is durable before the first byte that it describes leaves. Lines of kind `update`, `receipt` (the coordinator has ended the update)
and `self_report` (when its content changes; of readings only which ones). `messages` of a line has the bytes of control messages since the line before, by
kind; a power cut loses at most `MESSAGES_EVERY_BYTES` of that count. Not in it: keys at enrolment.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_client.store.small_files import checked_text, checked_values
from fedcg import files
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.artifacts.inspection import inspect

SENT_FILE = "sent.jsonl"
LEDGER_FILE = "ledger.jsonl"
"""What each round cost this device; its lines are of kind `round`."""
Line = dict[str, Any]
MESSAGES_EVERY_BYTES = 100_000
"""Control messages of so many bytes have a line of their own."""


class SentRecord:
    """The record of one device in one federation.

    Args:
        root: of the private store.
        federation: its federation.
        wall: unix seconds.
    """

    def __init__(self, root: Path, federation: str, wall: Callable[[], float]) -> None:
        self._path = root / SENT_FILE
        self._federation = federation
        self._wall = wall
        self._updates: set[str] | None = None
        self._report: Line | None = None
        self._messages = Counter[str]()

    def update(self, data: bytes) -> bool:
        """Record an update whose first byte is about to leave; returns False for one that is recorded already.

        Args:
            data: its bytes as they are sent.

        Raises:
            OSError: it could not be made durable; the update must not be sent now.
        """
        if self._updates is None:
            self._updates = {str(line.get("artifact")) for line in read_lines(self._path) if line["kind"] == "update"}
        artifact = artifact_id(data)
        if artifact in self._updates:
            return False
        seen, sizes = inspect(data), Counter[str]()
        for key, tensor in seen.tensors.items():
            sizes[key.partition("/")[0]] += tensor.nbytes
        head = seen.header
        report = {name: value for name, value in _mapping(head.get("report")).items() if value is not None}
        about = {"round": head.get("round"), "attempt": head.get("attempt"), "artifact": artifact, "bytes": len(data)}
        self._append({"kind": "update", **about, "parts": dict(sizes), "report": report, "facts": seen.facts})
        self._updates.add(artifact)
        return True

    def receipt(self, artifact: str, outcome: str) -> None:
        """Record how the coordinator ended an update."""
        self._append({"kind": "receipt", "artifact": artifact, "outcome": outcome})

    def self_report(self, condition: Mapping[str, Any]) -> None:
        """Record what the device is about to report of itself, where that has changed."""
        report = {name: value for name, value in condition.items() if value is not None}
        if report and report != self._report:
            self._append({"kind": "self_report", "report": report})
            self._report = report

    def message(self, kind: str, size: int) -> None:
        """Count a control message."""
        self._messages[kind] += size
        if self._messages.total() >= MESSAGES_EVERY_BYTES:
            self.close()

    def close(self) -> None:
        """Make the count of control messages durable, where there is room."""
        with contextlib.suppress(OSError):
            if self._messages:
                self._append({"kind": "messages"})

    def _append(self, line: Line) -> None:
        about = {"t": round(self._wall(), 3), "federation": self._federation, **line}
        if line["kind"] == "receipt":  # is no item of its own
            append_line(self._path, about)
            return
        append_line(self._path, {**about, "messages": dict(self._messages)})
        self._messages.clear()


def append_line(path: Path, line: Line) -> None:
    """Append a line to a record; durable when this returns.

    Raises:
        OSError: it could not be made durable.
    """
    files.append_line(path, checked_text(line))


def read_lines(path: Path) -> Iterator[Line]:
    """All whole lines of a record, oldest first; one that is torn or damaged is left out."""
    if path.exists():
        with path.open("rb") as lines:
            yield from filter(None, map(checked_values, lines))


def sent_items(path: Path, since: float = 0.0) -> list[Line]:
    """Updates and reports that left since a time, each update with its receipt: its outcome, or None while there is none."""
    items: list[Line] = []
    updates: dict[object, Line] = {}
    for line in read_lines(path):
        if line["kind"] == "receipt":
            if (update := updates.get(line.get("artifact"))) is not None:
                update["receipt"] = line.get("outcome")
            continue
        if line["kind"] == "update":
            line["receipt"] = None
            updates[line.get("artifact")] = line
        items.append(line)
    return [item for item in items if item["t"] >= since]


def totals(items: list[Line]) -> dict[str, dict[str, int]]:
    """By federation: updates, their bytes, those with a receipt, and reports of the device about itself."""
    found: dict[str, Counter[str]] = {}
    for item in items:
        counts = found.setdefault(str(item.get("federation")), Counter())
        if item["kind"] == "update":
            counts.update(updates=1, bytes=int(item.get("bytes") or 0), receipts=int(item["receipt"] is not None))
        counts.update(
            self_reports=int(item["kind"] == "self_report"), message_bytes=sum(_mapping(item.get("messages")).values())
        )
    names = ("updates", "bytes", "receipts", "self_reports", "message_bytes")
    return {federation: {name: counts[name] for name in names} for federation, counts in sorted(found.items())}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
