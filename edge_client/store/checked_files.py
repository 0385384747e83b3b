"""The checksummed files of a private store: small JSON files that are replaced atomically, and append-only records. Torch-free.

For each damaged file, the error states what is lost. `sent.jsonl` records all updates and self-reports that have ever left this device. It is
never rotated. A line is durable before the first byte that it describes leaves. Kinds of lines: `update`, `receipt` (the coordinator's final
answer to the update) and `self_report` (when its content changes; of readings only the names). `messages` in a line counts the bytes of control
messages since the previous line, by kind. A power cut loses at most `MESSAGES_EVERY_BYTES` of that count. Keys sent at enrolment are not recorded.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_client.errors import DamagedFileError, StoreError, unreadable
from fedcg import files
from fedcg.files import checked, replace_durably
from fedcg.sentences import texts
from fedcg.wire.artifacts.artifacts import artifact_id
from fedcg.wire.artifacts.inspection import inspect

_CHECK, _NUMBER = "check", "number"
COUNTER = "counter.json"
_RESTORE = "restore the whole store from a backup (`fedcg agent restore`), or enrol this device again with a new store"


_MADE_ANEW = frozenset({"accepted.json", "left_out.json", "memory.json"})
"""Files that are recreated if damaged, because no trained state depends on them."""
_COUNTED = frozenset({"seen.json", "sums.json", "weights.json", "sum_gate.json", "coordinator.json", "privacy.json"})
"""Files whose older copies must be refused. Each write gets the next number, which is stored in the file and in `COUNTER`."""


def damaged(path: Path, what: str = "is damaged") -> StoreError:
    """The error for a damaged file, with what is lost and what to do."""
    return DamagedFileError(f"{path} {what}. {texts().lost_files.get(path.name, _RESTORE.capitalize())}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file of the store. Only a missing file counts as empty.

    Raises:
        StoreError: the file can't be read, is damaged, or is an older copy. Treating it as empty would reset the order of broadcasts, or trust
            a replaced key.
    """
    if path.name not in _COUNTED:
        return _read(path)
    counter = path.with_name(COUNTER)
    before = _read(counter)  # read first, because another process may write meanwhile
    values = _read(path)
    number = _count(values, _NUMBER)
    values.pop(_NUMBER, None)
    may_be_deleted = _RESTORE not in texts().lost_files.get(path.name, _RESTORE)
    if number < _count(before, path.name) and not (may_be_deleted and not values):
        raise damaged(path, "is an older copy, restored without the rest of the store" if values else "is missing")
    if number > _count(before, _NUMBER) + 1 and number > _count(_read(counter), _NUMBER) + 1:
        raise damaged(counter, f"is missing, or older than {path.name}")
    return values


def is_gone(path: Path) -> bool:
    """Whether a counted file existed once and is missing now."""
    return not path.exists() and _count(_read(path.with_name(COUNTER)), path.name) > 0


def damage_of(path: Path) -> str:
    """A sentence about a damaged file whose content can be recreated or ignored; empty if the file is intact.

    Raises:
        StoreError: another kind of file is damaged.
    """
    if path.suffix == ".jsonl":
        return lost_lines(path)
    try:
        if path.suffix == ".json":
            read_json(path)
        elif checked(path.read_bytes()) is None:
            raise damaged(path)
    except DamagedFileError as error:
        if path.name not in _MADE_ANEW:
            raise
        return str(error)
    return ""


def _count(values: Mapping[str, Any], name: str) -> int:
    count = values.get(name)
    return count if isinstance(count, int) else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        values = checked_values(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    if values is None:
        raise damaged(path)
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the content of a small JSON file, with a checksum. Safe for several processes at once."""
    if path.name not in _COUNTED:
        replace_durably(path, checked_text(values))
        return
    with writing_alone(path.parent):
        kept = _read(path.with_name(COUNTER))
        number = _count(kept, _NUMBER) + 1
        # written first: after a crash in between, the counter is one behind
        replace_durably(path, checked_text({**values, _NUMBER: number}))
        replace_durably(path.with_name(COUNTER), checked_text({**kept, _NUMBER: number, path.name: number}))


@contextlib.contextmanager
def writing_alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder against other writing threads and processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def checked_text(values: Mapping[str, Any]) -> str:
    """Values as JSON with a checksum."""
    whole = {"format": 1, **values}
    return json.dumps({**whole, _CHECK: _check_of(json.loads(json.dumps(whole)))})


def lost_lines(path: Path) -> str:
    """A sentence about damaged lines of a record, which reading skips; empty if the record is intact or missing."""
    if not path.exists():
        return ""
    with path.open("rb") as lines:
        lost = sum(checked_values(line) is None for line in lines)
    return f"{path} is damaged: {lost} of its lines are ignored" if lost else ""


def checked_values(text: bytes | str) -> dict[str, Any] | None:
    """The values in a text from `checked_text`; None if it is damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(values, dict) and values.pop(_CHECK, None) == _check_of(values)
    return values if is_whole else None


def _check_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


SENT_FILE = "sent.jsonl"
LEDGER_FILE = "ledger.jsonl"
"""The cost of each round on this device, in lines of kind `round`."""
Line = dict[str, Any]
MESSAGES_EVERY_BYTES = 100_000
"""After this many bytes of control messages, the count is written as a separate line."""


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
        """Record an update before its first byte leaves. Returns False if it is already recorded.

        Args:
            data: its bytes as sent.

        Raises:
            OSError: the record could not be saved, so the update must not be sent now.
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
        """Record the coordinator's final answer to an update."""
        self._append({"kind": "receipt", "artifact": artifact, "outcome": outcome})

    def self_report(self, condition: Mapping[str, Any]) -> None:
        """Record a self-report before it is sent, if it has changed."""
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
        """Save the count of control messages, if the disk has room."""
        with contextlib.suppress(OSError):
            if self._messages:
                self._append({"kind": "messages"})

    def _append(self, line: Line) -> None:
        about = {"t": round(self._wall(), 3), "federation": self._federation, **line}
        if line["kind"] == "receipt":  # not an item in the list
            append_line(self._path, about)
            return
        append_line(self._path, {**about, "messages": dict(self._messages)})
        self._messages.clear()


def append_line(path: Path, line: Line) -> None:
    """Append a line to a record. It is durable when this returns.

    Raises:
        OSError: the line could not be saved.
    """
    files.append_line(path, checked_text(line))


def read_lines(path: Path) -> Iterator[Line]:
    """All intact lines of a record, oldest first. Damaged lines are skipped."""
    if path.exists():
        with path.open("rb") as lines:
            yield from filter(None, map(checked_values, lines))


def sent_items(path: Path, since: float = 0.0) -> list[Line]:
    """Updates and self-reports sent since a time. Each update has the outcome in its receipt, or None without a receipt."""
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
    """By federation: number of updates, their bytes, updates with a receipt, and self-reports."""
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
