"""The JSON files of a private store: each with a check of its own, and a sentence about what is lost where it is damaged. Torch-free."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.errors import DamagedFileError, StoreError, unreadable
from fedcg.files import checked, replace_durably

_CHECK, _NUMBER = "check", "number"
COUNTER = "counter.json"
_RESTORE = "restore the whole store from a backup (`fedcg agent restore`), or enrol this device anew with a new store"
_LOST = {
    "delivered.json": "It holds the receipts of updates and nothing else: delete it, and the last update is offered once more",
    "finalised.json": "It holds the outcome of the federation and nothing else: delete it, and the model is chosen and exported once more",
    "accepted.json": "It holds which images the next round uses and nothing else: delete it, and the round begins anew",
    "consent.json": "It holds what this device's owner approved and nothing else: delete it, and specs beyond the policy wait for approval again",
    "pause.json": "It holds the owner's pause and nothing else: delete it, and pause again where that is wanted",
    "traffic.json": "It holds the bytes of this day and nothing else: delete it, and they are counted from nothing",
    "revoked.json": "It holds that the coordinator has revoked this device and nothing else: delete it, and the coordinator is asked again",
    "memory.json": "It holds how much of a batch fits the memory and nothing else: delete it, and that is found out again",
    "left_out.json": "It lists images that could not be read and nothing else: delete it; the next round writes it anew",
    "format.json": "It holds whose store this is: restore it from a backup; the trained state beside it is untouched",
    "sums.json": "It holds the secrets of the open round's masked sum: when that round is over, delete it, and the next one has a sum again",
    "roster.json": "It holds the message keys of the cohort's devices and nothing else: delete it, and give them again with `fedcg cohort roster`",
    "seen.json": f"Without it an old broadcast could be played again: {_RESTORE}",
    "signing.pub": "It holds this device's public keys and nothing else: delete it; models that were signed with an earlier key are then not used",
    COUNTER: f"It says which copies of other files are the newest ones: {_RESTORE}",
    "coordinator.json": f"Without it a coordinator's key that was replaced would be trusted: {_RESTORE}",
}


_MADE_ANEW = frozenset({"accepted.json", "left_out.json", "memory.json"})
"""The files that are written anew where they are damaged: nothing that was trained depends on them."""
_COUNTED = frozenset({"seen.json", "sums.json", "coordinator.json", "privacy.json"})
"""The files whose older copies undo a promise. Each write of one takes the next number, which the file and `COUNTER` keep."""


def damaged(path: Path, what: str = "is damaged") -> StoreError:
    """The error for a damaged file: what is lost with it, and what to do."""
    return DamagedFileError(f"{path} {what}. {_LOST.get(path.name, _RESTORE.capitalize())}")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file of the store; only an absent one counts as empty.

    Raises:
        StoreError: it is there and can't be read, or its content is damaged, or it is an older copy: an empty one in its place
            would start the order of broadcasts anew, or trust a key that was rotated away.
    """
    if path.name not in _COUNTED:
        return _read(path)
    counter = path.with_name(COUNTER)
    before = _read(counter)  # first: a writer may go on meanwhile
    values = _read(path)
    number = _count(values, _NUMBER)
    values.pop(_NUMBER, None)
    may_be_deleted = _RESTORE not in _LOST.get(path.name, _RESTORE)
    if number < _count(before, path.name) and not (may_be_deleted and not values):
        raise damaged(path, "is an older copy, put back without the rest of the store" if values else "is missing")
    if number > _count(before, _NUMBER) + 1 and number > _count(_read(counter), _NUMBER) + 1:
        raise damaged(counter, f"is missing, or older than {path.name}")
    return values


def damage_of(path: Path) -> str:
    """The sentence about a damaged file whose content is written anew or does not count; nothing about a whole one.

    Raises:
        StoreError: it is another file, and damaged.
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
    """Give a small JSON file new content, with its check; several processes may do so at once."""
    if path.name not in _COUNTED:
        _write(path, values)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = _read(path.with_name(COUNTER))
        number = _count(kept, _NUMBER) + 1
        _write(path, {**values, _NUMBER: number})  # first: a crash between both leaves the counter one behind
        _write(path.with_name(COUNTER), {**kept, _NUMBER: number, path.name: number})
    finally:
        os.close(folder)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    replace_durably(path, checked_text(values))


def checked_text(values: Mapping[str, Any]) -> str:
    """Values as JSON with their check."""
    whole = {"format": 1, **values}
    return json.dumps({**whole, _CHECK: _check_of(json.loads(json.dumps(whole)))})


def lost_lines(path: Path) -> str:
    """The sentence about lines of a record that are damaged, and so are left out of what is read from it; nothing about a whole or absent one."""
    if not path.exists():
        return ""
    with path.open("rb") as lines:
        lost = sum(checked_values(line) is None for line in lines)
    return f"{path} is damaged: {lost} of its lines do not count" if lost else ""


def checked_values(text: bytes | str) -> dict[str, Any] | None:
    """The values in a text of `checked_text`, None where it is damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(values, dict) and values.pop(_CHECK, None) == _check_of(values)
    return values if is_whole else None


def _check_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
