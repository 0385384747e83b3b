"""The JSON files of a private store: each with a check of its own, and a sentence about what is lost where it is damaged. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.errors import DamagedFileError, StoreError, unreadable
from edge_client.store.sealed_files import StoreFiles

_CHECK = "check"
_RESTORE = "restore it from a backup, or enrol this device anew with a new store"
_LOST = {
    "delivered.json": "It holds the receipts of updates and nothing else: delete it, and the last update is offered once more",
    "finalised.json": "It holds the outcome of the federation and nothing else: delete it, and the model is chosen and exported once more",
    "accepted.json": "It holds which images the next round uses and nothing else: delete it, and the round begins anew",
    "left_out.json": "It lists images that could not be read and nothing else: delete it; the next round writes it anew",
    "format.json": "It holds whose store this is: restore it from a backup; the trained state beside it is untouched",
    "sums.json": "It holds the secrets of the open round's masked sum: when that round is over, delete it, and the next one has a sum again",
    "roster.json": "It holds the message keys of the cohort's devices and nothing else: delete it, and give them again with `fedcg cohort roster`",
    "seen.json": f"Without it an old broadcast could be played again: {_RESTORE}",
    "coordinator.json": f"Without it a coordinator's key that was replaced would be trusted: {_RESTORE}",
}


def damaged(path: Path) -> StoreError:
    """The error for a damaged file: what is lost with it, and what to do."""
    return DamagedFileError(f"{path} is damaged. {_LOST.get(path.name, _RESTORE.capitalize())}")


def read_json(files: StoreFiles, path: Path) -> dict[str, Any]:
    """A small JSON file of the store; only an absent one counts as empty.

    Raises:
        StoreError: it is there and can't be read, or its content is damaged: an empty one in its place would start the
            order of broadcasts anew, or trust a key that was rotated away.
    """
    try:
        values = json.loads(files.read(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except DamagedFileError as error:
        raise damaged(path) from error
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise damaged(path)
    check = values.pop(_CHECK, None)
    if check is None:  # earlier programs wrote none; else its very name is damaged
        check = next((value for name, value in values.items() if value == _check_of(_without(values, name))), None)
    if check is not None and check != _check_of(values):
        raise damaged(path)
    return values


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in values.items() if other != name}


def write_json(files: StoreFiles, path: Path, values: Mapping[str, Any]) -> None:
    """Give a small JSON file new content, with its check."""
    whole = {"format": 1, **values}
    files.replace(path, json.dumps({**whole, _CHECK: _check_of(json.loads(json.dumps(whole)))}).encode())


def _check_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
