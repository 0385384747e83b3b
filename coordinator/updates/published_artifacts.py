"""The artifacts that devices may fetch, the spec and the aggregates of the federation alone; and the requests for them, off the loop."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.schemas import ArtifactRef, Need
from fedcg.wire.transfer.chunk_sender import ChunkFile, file_ref
from fedcg.wire.transfer.windows import Ranges

OPEN_FILES = 8  # those that were used last; others are opened again when a device asks

log = logging.getLogger(__name__)


class PublishedArtifacts:
    """Describes artifacts for announcements, and opens them for the sender to read chunks from; holds none in memory.

    For any thread.

    Args:
        store: where they lie.
        chunk_bytes: chunk size of the link.
    """

    def __init__(self, store: ArtifactStore, chunk_bytes: int) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._allowed: set[str] = set()
        self._sources: dict[str, ChunkFile] = {}  # the one that was used last at the end
        self._lock = threading.Lock()

    def allow(self, artifact: str) -> None:
        """Let devices fetch an artifact."""
        self._allowed.add(artifact)

    def forget(self, artifact: str) -> None:
        """Stop serving an artifact: no device may fetch it any more."""
        self._allowed.discard(artifact)
        with self._lock:
            self._sources.pop(artifact, None)

    def allows(self, artifact: str) -> bool:
        """Whether devices may fetch it."""
        return artifact in self._allowed

    def change_chunk_bytes(self, chunk_bytes: int) -> None:
        """Use another chunk size; refs have to be announced anew."""
        with self._lock:
            if chunk_bytes != self._chunk_bytes:
                self._chunk_bytes = chunk_bytes
                self._sources = {}

    def known(self, artifact: str) -> ChunkFile | None:
        """The source that `source` opened before, without touching the disk."""
        with self._lock:
            source = self._sources.pop(artifact, None)
            if source is not None:
                self._sources[artifact] = source
            return source

    def ref(self, artifact: str) -> ArtifactRef:
        """The reference that announces an artifact; see `source`."""
        return self.source(artifact).ref

    def source(self, artifact: str) -> ChunkFile:
        """The source of an artifact's chunks. Reads all of it on the first call: not on the event loop.

        Raises:
            FileNotFoundError: it is gone.
            IntegrityError: its file is damaged.
        """
        known = self.known(artifact)
        if known is not None:
            return known
        path, chunk_bytes = self._store.local(artifact), self._chunk_bytes
        ref = file_ref(path, chunk_bytes)
        if ref.id != artifact:
            raise IntegrityError(f"{path} is damaged: its content does not have the sha256 it is named by")
        source = ChunkFile(path, ref)
        with self._lock:
            if chunk_bytes == self._chunk_bytes:
                self._sources[artifact] = source
            for oldest in list(self._sources)[:-OPEN_FILES]:
                del self._sources[oldest]
        return source


@dataclass(eq=False)
class ArtifactRequests:
    """Serves what devices ask for; an artifact that is not open is read once, and stays open for all that wait for it. One request of each device waits, the newest: a device asks again for what it misses.

    Args:
        published: the artifacts that devices may fetch.
        send: sends chunks of an open artifact to a device; from any thread.
        run: runs work that reads a disk on another thread, one after the other.
    """

    published: PublishedArtifacts
    send: Callable[[str, ChunkFile, Ranges], None]
    run: Callable[[Callable[[], object]], None]
    _waiting: dict[str, Need] = field(default_factory=dict, init=False)  # by device, for each of which a read is queued
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def serve(self, device: str, need: Need) -> None:
        """Send what a device asks for, at once when the artifact is open; else when it has been read."""
        if not self.published.allows(need.artifact):
            return
        source = self.published.known(need.artifact)
        if source is not None:
            self.send(device, source, need.ranges)
            return
        with self._lock:
            is_queued = device in self._waiting
            self._waiting[device] = need
        if not is_queued:
            self.run(partial(self._read, device))

    def _read(self, device: str) -> None:
        with self._lock:
            need = self._waiting.pop(device)
        try:
            source = self.published.source(need.artifact)
        except (IntegrityError, OSError):
            log.exception("%s asked for artifact %s, which can't be read", device, need.artifact)
            return
        self.send(device, source, need.ranges)
