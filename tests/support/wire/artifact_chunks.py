"""An artifact in memory as a sender's reference, chunks and frames."""

import hashlib
from collections.abc import Iterable, Iterator

from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunks import chunk_frame


def make_ref(data: bytes, chunk_bytes: int) -> ArtifactRef:
    """Return the reference that announces an artifact."""
    return ArtifactRef(id=hashlib.sha256(data).hexdigest(), size=len(data), chunk_bytes=chunk_bytes)


def cut(data: bytes, chunk_bytes: int) -> list[bytes]:
    """Return the pieces of an artifact, in order; only the last may be shorter."""
    return [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]


def frames_for(data: bytes, ref: ArtifactRef, ranges: Iterable[tuple[int, int]] | None = None) -> Iterator[bytes]:
    """Return the frames of the granted chunks, in the order of the grants; of all chunks if `ranges` is None.

    Indices beyond the last chunk are left out: a grant comes from the other side and is not trusted.
    """
    for first, count in [(0, ref.chunks)] if ranges is None else ranges:
        for index in range(first, min(first + count, ref.chunks)):
            yield chunk_frame(ref.id, index, data[index * ref.chunk_bytes : (index + 1) * ref.chunk_bytes])
