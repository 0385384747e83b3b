"""The artifacts that devices may fetch: the spec and the aggregates of the federation, nothing else."""

from __future__ import annotations

from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.messages import ArtifactRef
from fedcg.wire.transfer.chunk_sender import ChunkFile, file_ref

OPEN_FILES = 8  # the spec and the newest aggregates; others are opened again when a device asks


class PublishedArtifacts:
    """Describes artifacts for announcements, and opens them for the sender to read chunks from; holds none in memory.

    Args:
        store: where they lie.
        chunk_bytes: chunk size of the link.
    """

    def __init__(self, store: ArtifactStore, chunk_bytes: int) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._allowed: set[str] = set()
        self._sources: dict[str, ChunkFile] = {}

    def allow(self, artifact: str) -> None:
        """Let devices fetch an artifact."""
        self._allowed.add(artifact)

    def forget(self, artifact: str) -> None:
        """Stop serving an artifact: no device may fetch it any more."""
        self._allowed.discard(artifact)
        self._sources.pop(artifact, None)

    def allows(self, artifact: str) -> bool:
        """Whether devices may fetch it."""
        return artifact in self._allowed

    def change_chunk_bytes(self, chunk_bytes: int) -> None:
        """Use another chunk size; refs have to be announced anew."""
        if chunk_bytes != self._chunk_bytes:
            self._chunk_bytes = chunk_bytes
            self._sources = {}

    def known(self, artifact: str) -> ChunkFile | None:
        """The source that `source` opened before, without touching the disk."""
        return self._sources.get(artifact)

    def ref(self, artifact: str) -> ArtifactRef:
        """The reference that announces an artifact; see `source`."""
        return self.source(artifact).ref

    def source(self, artifact: str) -> ChunkFile:
        """The source of an artifact's chunks. Reads all of it on the first call: not on the event loop.

        Raises:
            FileNotFoundError: it is gone.
            IntegrityError: its file is damaged.
        """
        known = self._sources.get(artifact)
        if known is None:
            path = self._store.local(artifact)
            ref = file_ref(path, self._chunk_bytes)
            if ref.id != artifact:
                raise IntegrityError(f"{path} is damaged: its content does not have the sha256 it is named by")
            known = self._sources[artifact] = ChunkFile(path, ref)
            for oldest in list(self._sources)[:-OPEN_FILES]:
                self._sources.pop(oldest, None)
        return known
