"""The coordinator's artifacts: their storage in a directory, optionally backed by S3, and their deletion after rounds close.

S3, or a compatible store, has the durable copy. Uploads and downloads are retried until the store responds; `problem` has the reason in the meantime.
Credentials, region and, for other stores than Amazon's, the endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) or the machine's role.
The last rounds' updates and their base aggregates are kept. Data for a restart is always kept: the spec, the newest aggregate with its server state, and the open round.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.errors import StoreError
from coordinator.paths import Home
from coordinator.storage.store import Store
from fedcg.files import file_sha256
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError

if TYPE_CHECKING:
    from obstore.store import S3Store


FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
PIECE_BYTES = 1 << 20

log = logging.getLogger(__name__)


def artifacts_of(home: Home, *, waits: bool = False) -> ArtifactStore:
    """The artifact store in a coordinator's configuration.

    Args:
        home: the coordinator's.
        waits: retry if the store does not respond, instead of raising StoreError.

    Raises:
        StoreError: the library for S3 is not installed.
    """
    url = home.config().storage.artifacts
    if url is None:
        return ArtifactStore(home.artifacts)
    remote = ObjectStore(url)
    if not waits:
        remote.stop_waiting()
    return ArtifactStore(home.artifacts, remote)


class ObjectStore:
    """A prefix `url` of a bucket; every artifact is an object named by its sha256.

    Attributes:
        problem: why the store can't be used now; empty while it is available.
    """

    def __init__(self, url: str) -> None:
        self.problem = ""
        self._url = url
        self._store = _open(url)
        self._stopped = threading.Event()

    def stop_waiting(self) -> None:
        """From now on, raise StoreError at once if the store does not respond."""
        self._stopped.set()

    def upload(self, artifact: str, file: Path) -> None:
        """Store a file durably.

        Raises:
            StoreError: the store can't be used, after `stop_waiting`.
        """
        import obstore

        self._until_answered(f"{artifact} can't be stored", lambda: obstore.put(self._store, artifact, file))

    def download(self, artifact: str, file: Path) -> None:
        """Write an artifact to a file and check it.

        Raises:
            FileNotFoundError: the artifact is not in the store.
            IntegrityError: its content does not match the sha256 in its name.
            StoreError: the store can't be used, after `stop_waiting`.
        """
        self._until_answered(f"{artifact} can't be read", lambda: self._read(artifact, file))
        if file_sha256(file) != artifact:
            raise IntegrityError(
                f"{self._url}/{artifact} is damaged: its content does not match the sha256 in its name"
            )

    def delete(self, artifacts: Collection[str]) -> None:
        """Delete the artifacts that exist; those that can't be deleted now are deleted after the next start."""
        import obstore

        try:
            found = {str(item["path"]).rpartition("/")[2] for page in obstore.list(self._store) for item in page}
            if gone := sorted(found & set(artifacts)):
                obstore.delete(self._store, gone)
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            log.warning("%s: %d old artifacts are not deleted yet: %s", self._url, len(artifacts), _first_line(error))

    def _read(self, artifact: str, file: Path) -> None:
        import obstore

        with file.open("wb") as target:
            for piece in obstore.get(self._store, artifact).stream(min_chunk_size=PIECE_BYTES):
                target.write(piece)

    def _until_answered(self, what: str, work: Callable[[], object]) -> None:
        pause_s = FIRST_PAUSE_S
        while reason := self._problem_of(work):
            if not self.problem:
                log.error("%s: %s. Rounds wait; check [storage] artifacts, network and credentials", what, reason)
            self.problem = reason
            if self._stopped.wait(pause_s):
                raise StoreError(f"{what}: {reason}")
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if self.problem:
            log.warning("the artifact store %s is available again", self._url)
        self.problem = ""

    def _problem_of(self, work: Callable[[], object]) -> str:
        """Run work; return why the store failed, or "". Raises FileNotFoundError if it has no such object."""
        import obstore

        try:
            work()
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                return f"the bucket of the artifact store {self._url} does not exist"
            if isinstance(error, (obstore.exceptions.NotFoundError, FileNotFoundError)):
                raise FileNotFoundError(_first_line(error)) from error
            return f"the artifact store {self._url} can't be used: {_first_line(error)}"
        return ""


def _open(url: str) -> S3Store:
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise StoreError("artifacts in S3 need obstore: pip install 'fedcg-edge[s3]'") from error
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    # Retries are in `_until_answered`, where they are logged.
    return S3Store.from_url(
        url,
        client_options={"connect_timeout": "5s", "timeout": "60s", "allow_http": allow_http},
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=10)},
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


UNKNOWN_S = 3600.0
"""Age at which a file without a record is deleted: other processes store artifacts before their records."""


@dataclass(eq=False)
class Pruner:
    """Prunes one federation.

    Args:
        store: the database with the artifacts of each round.
        artifacts: the directory of artifacts.
        federation: its id.
        keep_rounds: number of closed rounds whose artifacts are kept.
        forget: called with every artifact before it is deleted.
    """

    store: Store
    artifacts: ArtifactStore
    federation: str
    keep_rounds: int
    forget: Callable[[str], None]
    _done: int = field(default=0, init=False)  # this process has pruned the rounds before this one

    def prune(self, closed: int) -> tuple[int, int]:
        """Delete the artifacts of rounds before the kept ones. Safe to repeat after an interrupted call.

        Args:
            closed: the round that was closed last.

        Returns:
            Number of deleted files, and their bytes.
        """
        first_kept = closed - self.keep_rounds + 1
        if first_kept <= self._done:
            return 0, 0
        old = self.store.artifacts_of_rounds(self.federation, self._done, first_kept)
        kept = self.store.artifacts_of_rounds(self.federation, first_kept, None)
        spared = kept | self.store.pinned() | {self.store.federation(self.federation).spec}
        gone = sorted(old - spared - self._known(but=self.federation))
        for artifact in gone:
            self.forget(artifact)
        pruned = self.artifacts.delete_all(gone)
        self._done = first_kept
        return pruned

    def sweep(self, now: float) -> tuple[int, int]:
        """Delete files without a record in any federation, left by a process killed before it stored the record.

        Args:
            now: unix time.

        Returns:
            Number of deleted files, and their bytes.
        """
        files = list(self.artifacts.ids())  # before reading the records, so that new files stay
        known = self._known()
        unknown = [file for file in files if file not in known]
        return self.artifacts.delete_all(
            file for file in unknown if self.artifacts.path(file).stat().st_mtime < now - UNKNOWN_S
        )

    def _known(self, but: str = "") -> set[str]:
        """The artifacts in the records of all federations (except one); equal server states share one file."""
        known: set[str] = set()
        for federation in self.store.federations():
            if federation.id != but:
                known |= {federation.spec} | self.store.artifacts_of_rounds(federation.id, 0, None)
        return known
