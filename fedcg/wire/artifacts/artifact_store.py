"""A directory of artifacts, each in a file named by its sha256. Knows nothing of their content."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedcg.files import file_sha256, fsync_path, replace_durably
from fedcg.wire.errors import IntegrityError, MalformedError

_ID = re.compile(r"[0-9a-f]{64}")


class ArtifactStore:
    """Artifacts in one directory, `root`; one whose id `put` returned survives a power cut."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Keep an artifact durably and return its id."""
        name = hashlib.sha256(data).hexdigest()
        target = self.root / name
        if not target.exists() or file_sha256(target) != name:
            replace_durably(target, data)
        target.touch()  # a file that was here already is in use again
        return name

    def adopt(self, file: Path, artifact: str) -> None:
        """Take over a file of the same file system whose content has the sha256 of its new name, durably."""
        fsync_path(file)
        file.replace(self.path(artifact))
        fsync_path(self.root)

    def get(self, artifact: str) -> bytes:
        """The bytes of an artifact.

        Raises:
            FileNotFoundError: it is not here.
            IntegrityError: the file's content does not have the sha256 in its name; delete it and fetch it again.
        """
        data = self.path(artifact).read_bytes()
        if hashlib.sha256(data).hexdigest() != artifact:
            raise IntegrityError(
                f"{self.path(artifact)} is damaged: its content does not have the sha256 it is named by"
            )
        return data

    def path(self, artifact: str) -> Path:
        """The path of an artifact, whether or not it exists.

        Raises:
            MalformedError: not 64 hex digits.
        """
        if not _ID.fullmatch(artifact):
            raise MalformedError(f"{artifact!r} is not an artifact id (64 hex digits)")
        return self.root / artifact

    def has(self, artifact: str) -> bool:
        """Whether an artifact is here (its content is checked by `get`)."""
        return self.path(artifact).is_file()

    def delete(self, artifact: str) -> None:
        """Forget an artifact; nothing happens when it is not here."""
        self.path(artifact).unlink(missing_ok=True)
        fsync_path(self.root)

    def delete_all(self, artifacts: Iterable[str]) -> tuple[int, int]:
        """Forget several; returns how many files went and their bytes. Those that are not here are passed over."""
        sizes: list[int] = []
        for artifact in artifacts:
            with contextlib.suppress(FileNotFoundError):
                size = self.path(artifact).stat().st_size
                self.path(artifact).unlink()
                sizes.append(size)
        fsync_path(self.root)
        return len(sizes), sum(sizes)

    def ids(self) -> Iterator[str]:
        """The ids of all artifacts here, sorted."""
        return iter(sorted(entry.name for entry in self.root.iterdir() if _ID.fullmatch(entry.name)))
