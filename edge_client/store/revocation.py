"""The coordinator's statement that it has revoked this device, kept so that a restarted agent, its status and the doctor know it."""

from __future__ import annotations

from pathlib import Path

from fedcg.files import replace_durably

REVOKED_FILE = "revoked"
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

    @property
    def holds(self) -> bool:
        """Whether this device is revoked, as far as it knows."""
        return self._path.exists() and self._path.read_text(encoding="ascii") == self._key

    def note(self, *, revoked: bool) -> None:
        """Keep a statement of the coordinator: this one, or a welcome, which is the end of it."""
        if revoked:
            replace_durably(self._path, self._key)
        else:
            self._path.unlink(missing_ok=True)
