"""The other side of a transfer for scripted peers: an artifact assembled in memory, with the product's own grants."""

import hashlib

from fedcg.wire.errors import IntegrityError, MalformedError
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunks import Chunk, check_chunk
from fedcg.wire.transfer.windows import ChunkRecord, Ranges, Window


class Receiver:
    """Assembles one artifact in memory and returns the chunks to request; see `ChunkRecord` for the arguments."""

    def __init__(self, ref: ArtifactRef, window: Window | None = None, stall_s: float = 2.0) -> None:
        self._grants = ChunkRecord(ref, window or Window(), stall_s)
        self._have: dict[int, bytes | memoryview] = {}

    @property
    def ref(self) -> ArtifactRef:
        """The artifact being received."""
        return self._grants.ref

    @property
    def progress(self) -> tuple[int, int]:
        """The number of received chunks and of all chunks."""
        return len(self._have), self.ref.chunks

    @property
    def complete(self) -> bool:
        """Whether every chunk was received (`data` checks their sum)."""
        return self._grants.complete

    def feed(self, chunk: Chunk, now: float) -> bool:
        """Add a chunk, requested or not; return True if it was new.

        A chunk of another artifact and a repeated chunk change nothing.

        Raises:
            MalformedError: invalid index or length for this artifact.
        """
        if not check_chunk(self.ref, chunk) or not self._grants.received(chunk.index, now):
            return False
        self._have[chunk.index] = chunk.data
        return True

    def next_need(self, now: float) -> Ranges | None:
        """Return chunks to grant now as (first, count) pairs, or None if there is nothing to request now."""
        return self._grants.next_need(now)

    def data(self) -> bytes:
        """Return the whole artifact.

        Raises:
            MalformedError: not complete yet.
            IntegrityError: the chunks don't have the announced sha256; the receiver starts again from nothing.
        """
        if not self.complete:
            raise MalformedError("an artifact was read before all its chunks arrived")
        data = b"".join(self._have[index] for index in range(self.ref.chunks))
        if hashlib.sha256(data).hexdigest() != self.ref.id:
            self._have.clear()
            self._grants.restore(())
            raise IntegrityError(f"the chunks of artifact {self.ref.id} don't have its sha256; fetch it again")
        return data
