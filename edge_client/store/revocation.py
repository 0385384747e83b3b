"""The coordinator's statement that it has revoked this device, kept so that a restarted agent, its status and the doctor know it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from edge_client.store.small_files import read_json, write_json

REVOKED_FILE = "revoked.json"
REVOKED_ADVICE = (
    "the coordinator has revoked this device; to take part again, it is enrolled anew with a token of the operator: "
    "`fedcg token create --replaces DEVICE`"
)


class Revocation:
    """What a store holds of it; it is about one message key, and void once the device is enrolled anew.

    Args:
        root: the private store.
        key: this device's public message key, in hex.
    """

    def __init__(self, root: Path, key: str) -> None:
        self._path, self._key = root / REVOKED_FILE, key

    @cached_property
    def holds(self) -> bool:
        """Whether this device is revoked, as far as it knows; read once.

        Raises:
            StoreError: the file is damaged.
        """
        return read_json(self._path).get("key") == self._key

    def note(self, *, revoked: bool) -> None:
        """Keep a statement of the coordinator: this one, or a welcome, which is the end of it."""
        self.holds = revoked
        if revoked:
            write_json(self._path, {"key": self._key})
        else:
            self._path.unlink(missing_ok=True)
