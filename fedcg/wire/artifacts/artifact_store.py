"""A directory of artifacts, each in a file named by its sha256. Knows nothing of their content.

Where the durable place of artifacts is elsewhere (`Remote`), the directory is a cache of it.
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
    """The durable place of artifacts whose directory is a cache."""

    @property
    def problem(self) -> str:
        """Why it can't be used now; empty while it can."""

    def upload(self, artifact: str, file: Path) -> None:
        """Store a file durably; waits for a store that can't be reached."""

    def download(self, artifact: str, file: Path) -> None:
        """Write an artifact to a file, and check its sha256; FileNotFoundError when it is not there."""

    def delete(self, artifacts: Collection[str]) -> None:
        """Delete those of the artifacts that are there."""

    def stop_waiting(self) -> None:
        """End waiting calls, and later ones at once, with an error."""


class ArtifactStore:
    """Artifacts in one directory, `root`; one whose id `put` returned survives a power cut.

    Args:
        root: the directory.
        remote: holds all artifacts durably, where the directory is a cache: what is stored is there before a method returns.
    """

    def __init__(self, root: Path, remote: Remote | None = None) -> None:
        self.root = root
        self._remote = remote
        root.mkdir(parents=True, exist_ok=True)

    @property
    def problem(self) -> str:
        """Why the remote store can't be used now; empty while it can, or without one."""
        return "" if self._remote is None else self._remote.problem

    def stop_waiting(self) -> None:
        """End calls that wait for the remote store, and later ones at once, with an error."""
        if self._remote is not None:
            self._remote.stop_waiting()

    def keep(self, artifact: str) -> None:
        """Make durable what another process has written into the directory."""
        if self._remote is not None:
            self._remote.upload(artifact, self.path(artifact))

    def local(self, artifact: str) -> Path:
        """The file of an artifact, fetched into the directory where it is missing.

        Raises:
            FileNotFoundError: it is neither here nor in the remote store.
            IntegrityError: the remote store's is damaged.
        """
        path = self.path(artifact)
        if self._remote is not None and not path.exists():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self.root) as folder:
                fetched = Path(folder) / artifact
                self._remote.download(artifact, fetched)
                self._take(fetched, artifact)
        return path

    def put(self, data: bytes) -> str:
        """Keep an artifact durably and return its id."""
        name = hashlib.sha256(data).hexdigest()
        target = self.root / name
        if not target.exists() or file_sha256(target) != name:
            replace_durably(target, data)
        target.touch()  # a file that was here already is in use again
        self.keep(name)
        return name

    def adopt(self, file: Path, artifact: str) -> None:
        """Take over a file of the same file system whose content has the sha256 of its new name, durably."""
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
        self.delete_all([artifact])

    def delete_all(self, artifacts: Iterable[str]) -> tuple[int, int]:
        """Forget several; returns how many files went and their bytes. Those that are not here are passed over."""
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
