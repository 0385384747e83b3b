"""A directory of artifacts, each in a file named by its sha256. This module must not know their content.

If artifacts are stored durably elsewhere (`Remote`), the directory is a cache.
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from fedcg.files import file_sha256, fsync_path, replace_durably
from fedcg.wire.errors import IntegrityError, MalformedError

_ID = re.compile(r"[0-9a-f]{64}")


class Remote(Protocol):
    """Durable storage of artifacts; the directory is its cache."""

    @property
    def problem(self) -> str:
        """Why the storage is unavailable; empty if it is available."""

    def upload(self, artifact: str, file: Path) -> None:
        """Store a file durably; waits while the storage is unavailable."""

    def download(self, artifact: str, file: Path) -> None:
        """Write an artifact to a file and check its sha256; FileNotFoundError if it does not exist."""

    def delete(self, artifacts: Collection[str]) -> None:
        """Delete the artifacts that exist."""

    def stop_waiting(self) -> None:
        """End waiting calls with an error, and later calls immediately."""


class ArtifactStore:
    """Artifacts in one directory, `root`; one whose id `put` returned survives a power cut.

    Args:
        root: the directory.
        remote: holds all artifacts durably if the directory is a cache; a method returns only after its artifact is stored there.
    """

    def __init__(self, root: Path, remote: Remote | None = None) -> None:
        self.root = root
        self._remote = remote
        root.mkdir(parents=True, exist_ok=True)

    @property
    def problem(self) -> str:
        """Why the remote storage is unavailable; empty if it is available, or without one."""
        return "" if self._remote is None else self._remote.problem

    def stop_waiting(self) -> None:
        """End calls that wait for the remote storage with an error, and later calls immediately."""
        if self._remote is not None:
            self._remote.stop_waiting()

    def keep(self, artifact: str) -> None:
        """Make an artifact durable that another process has written into the directory."""
        if self._remote is not None:
            self._remote.upload(artifact, self.path(artifact))

    def local(self, artifact: str) -> Path:
        """The file of an artifact, fetched into the directory if it is missing.

        Raises:
            FileNotFoundError: it is neither here nor in the remote storage.
            IntegrityError: the remote copy is damaged.
        """
        path = self.path(artifact)
        if self._remote is not None and not path.exists():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self.root) as folder:
                fetched = Path(folder) / artifact
                self._remote.download(artifact, fetched)
                self._take(fetched, artifact)
        return path

    def put(self, data: bytes) -> str:
        """Store an artifact durably and return its id."""
        name = hashlib.sha256(data).hexdigest()
        target = self.root / name
        if not target.exists() or file_sha256(target) != name:
            replace_durably(target, data)
        target.touch()  # an existing file is in use again
        self.keep(name)
        return name

    def adopt(self, file: Path, artifact: str) -> None:
        """Take over a file of the same file system durably. The sha256 of its content must be its new name."""
        self._take(file, artifact)
        self.keep(artifact)

    def _take(self, file: Path, artifact: str) -> None:
        fsync_path(file)
        file.replace(self.path(artifact))
        fsync_path(self.root)

    def get(self, artifact: str) -> bytes:
        """The bytes of an artifact.

        Raises:
            FileNotFoundError: it is not here.
            IntegrityError: the file's content does not have the sha256 in its name; delete it and fetch it again.
        """
        data = self.local(artifact).read_bytes()
        if hashlib.sha256(data).hexdigest() != artifact:
            raise IntegrityError(f"{self.path(artifact)} is damaged: its content does not have the sha256 in its name")
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
        """Whether an artifact exists here (`get` checks its content)."""
        return self.path(artifact).is_file()

    def delete(self, artifact: str) -> None:
        """Delete an artifact, if it exists."""
        self.delete_all([artifact])

    def delete_all(self, artifacts: Iterable[str]) -> tuple[int, int]:
        """Delete several artifacts; missing ones are skipped. Returns the number of deleted files and their bytes."""
        sizes: list[int] = []
        gone = list(artifacts)
        for artifact in gone:
            with contextlib.suppress(FileNotFoundError):
                size = self.path(artifact).stat().st_size
                self.path(artifact).unlink()
                sizes.append(size)
        fsync_path(self.root)
        if self._remote is not None and gone:
            self._remote.delete(gone)
        return len(sizes), sum(sizes)

    def ids(self) -> Iterator[str]:
        """The ids of all artifacts here, sorted."""
        return iter(sorted(entry.name for entry in self.root.iterdir() if _ID.fullmatch(entry.name)))
