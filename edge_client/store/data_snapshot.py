"""The data snapshot of a round: which files, with which content, in which split. Torch-free.

Accepting a round fixes its snapshot; the round and every repeat of it use only that, even if the folder grows meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SnapshotFile:
    """One image.

    Attributes:
        path: relative to the data root.
        sha256: of the file's bytes, in hex.
        label: index into the spec's classes.
        split: train, val or test.
    """

    path: str
    sha256: str
    label: int
    split: str


@dataclass(frozen=True)
class Snapshot:
    """All images of a round, ordered by path within each split.

    Attributes:
        defence: the data defence that the training images went through, with its parameters; empty without one.
        defended: digest of the images that were trained on in their place.
    """

    files: tuple[SnapshotFile, ...]
    defence: str = ""
    defended: str = ""

    def split(self, name: str) -> tuple[SnapshotFile, ...]:
        """The files of one split."""
        return tuple(file for file in self.files if file.split == name)

    def counts(self) -> dict[str, int]:
        """Images per split."""
        return {name: len(self.split(name)) for name in SPLITS}

    def encode(self) -> bytes:
        """Canonical JSON; the same snapshot always gives the same bytes."""
        files = [asdict(file) for file in self.files]
        whole = {"defence": self.defence, "defended": self.defended, "files": files} if self.defence else files
        return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The sha256 of `encode()`, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    @staticmethod
    def decode(payload: bytes) -> Snapshot:
        """The snapshot in `payload`.

        Raises:
            ValueError: not a snapshot.
        """
        try:
            found = json.loads(payload)
            about = found if isinstance(found, dict) else {"files": found}
            return Snapshot(**{**about, "files": tuple(SnapshotFile(**entry) for entry in about["files"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a data snapshot: {error}") from error
