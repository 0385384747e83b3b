"""The artifacts that devices may fetch: only the federation's spec and aggregates. Handles requests for them outside the loop."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.schemas import Need
from fedcg.wire.transfer.chunk_sender import ChunkFile, file_ref
from fedcg.wire.transfer.windows import Ranges

OPEN_FILES = 8  # last used files; others are opened again on request

log = logging.getLogger(__name__)


class PublishedArtifacts:
    """Opens artifacts, with the references that announce them, so that the sender can read chunks; keeps none in memory.

    Thread-safe.

    Args:
        store: the artifact store.
        chunk_bytes: chunk size of the link.
    """

    def __init__(self, store: ArtifactStore, chunk_bytes: int) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._allowed: set[str] = set()
        self._sources: dict[str, ChunkFile] = {}  # the last used one is at the end
        self._lock = threading.Lock()

    def allow(self, artifact: str) -> None:
        """Allow devices to fetch an artifact."""
        self._allowed.add(artifact)

    def forget(self, artifact: str) -> None:
        """Stop serving an artifact."""
        self._allowed.discard(artifact)
        with self._lock:
            self._sources.pop(artifact, None)

    def allows(self, artifact: str) -> bool:
        """Whether devices may fetch an artifact."""
        return artifact in self._allowed

    def change_chunk_bytes(self, chunk_bytes: int) -> None:
        """Use another chunk size; refs must be announced again."""
        with self._lock:
            if chunk_bytes != self._chunk_bytes:
                self._chunk_bytes = chunk_bytes
                self._sources = {}

    def known(self, artifact: str) -> ChunkFile | None:
        """The source if already opened by `source`, without disk access."""
        with self._lock:
            source = self._sources.pop(artifact, None)
            if source is not None:
                self._sources[artifact] = source
            return source

    def source(self, artifact: str) -> ChunkFile:
        """The source of an artifact's chunks. The first call reads the whole file, so don't call it on the event loop.

        Raises:
            FileNotFoundError: the file is missing.
            IntegrityError: the file is damaged.
        """
        known = self.known(artifact)
        if known is not None:
            return known
        path, chunk_bytes = self._store.local(artifact), self._chunk_bytes
        ref = file_ref(path, chunk_bytes)
        if ref.id != artifact:
            raise IntegrityError(f"{path} is damaged: its content does not match the sha256 in its name")
        source = ChunkFile(path, ref)
        with self._lock:
            if chunk_bytes == self._chunk_bytes:
                self._sources[artifact] = source
            for oldest in list(self._sources)[:-OPEN_FILES]:
                del self._sources[oldest]
        return source


@dataclass(eq=False)
class ArtifactRequests:
    """Serves the devices' requests. An artifact is read once and stays open for all waiting devices. Only the newest request of each device waits, since devices request missing chunks again.

    Args:
        published: the artifacts that devices may fetch.
        send: sends chunks of an open artifact to a device; thread-safe.
        run: runs disk reads on another thread, one after another.
    """

    published: PublishedArtifacts
    send: Callable[[str, ChunkFile, Ranges], None]
    run: Callable[[Callable[[], object]], None]
    _waiting: dict[str, Need] = field(default_factory=dict, init=False)  # by device; a read is queued for each
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def serve(self, device: str, need: Need) -> None:
        """Send requested chunks: at once if the artifact is open, otherwise after reading it."""
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
            log.exception("%s requested artifact %s, which can't be read", device, need.artifact)
            return
        self.send(device, source, need.ranges)
