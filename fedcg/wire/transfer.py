"""How an artifact crosses a link: cut into chunks, granted under a window, put together again.

Pure: no I/O, no threads, no clock of its own. A receiver grants chunks (`Need` messages) and a sender sends what was
granted; lost, repeated, reordered and foreign chunks do no harm. Broadcast chunks may be fed without any grant.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError, TransportError
from fedcg.wire.messages import MAX_ARTIFACT_BYTES, MAX_CHUNK_BYTES, ArtifactRef

MAGIC = b"FCGC"
_HEAD = struct.Struct(">4s32sI8s")
FRAME_OVERHEAD_BYTES = _HEAD.size
MIN_CHUNK_BYTES = 256
MAX_STALL_S = 60.0
GAP_FACTOR = 2.0  # a link is given this many times the pause between two chunks before its grants count as lost
CALMING = 0.75  # how fast that patience shrinks again, per chunk
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chunk:
    """One piece of an artifact; `index` counts from 0."""

    artifact: str
    index: int
    data: bytes


@dataclass(frozen=True)
class Window:
    """How much may be granted and not yet received: chunks and bytes, whichever is reached first."""

    chunks: int = 16
    bytes: int = 1_900_000


def chunk_bytes_for(max_payload: int, configured: int = MAX_CHUNK_BYTES) -> int:
    """The chunk size for a link: the smallest of what it takes, what is configured and 120 KB, minus the frame's head.

    Raises:
        TransportError: the link takes too little for any chunk.
    """
    size = min(max_payload, configured, MAX_CHUNK_BYTES) - FRAME_OVERHEAD_BYTES
    if size < MIN_CHUNK_BYTES:
        raise TransportError(
            f"the link takes payloads of {max_payload} bytes, too little for a chunk of {MIN_CHUNK_BYTES}; "
            "raise the broker's maximum packet size or the configured chunk size"
        )
    return size


def make_ref(data: bytes, chunk_bytes: int) -> ArtifactRef:
    """The reference that announces an artifact.

    Raises:
        TooLargeError: the artifact is over the bound of the protocol.
    """
    if len(data) > MAX_ARTIFACT_BYTES:
        raise TooLargeError(f"an artifact of {len(data)} bytes is over the bound of {MAX_ARTIFACT_BYTES}")
    return ArtifactRef(id=hashlib.sha256(data).hexdigest(), size=len(data), chunk_bytes=chunk_bytes)


def cut(data: bytes, chunk_bytes: int) -> list[bytes]:
    """The pieces of an artifact, in order; only the last one may be shorter."""
    return [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]


def chunk_frame(artifact: str, index: int, data: bytes) -> bytes:
    """The bytes of one chunk on the wire: magic, artifact id, index, truncated hash of all of it, data."""
    name = bytes.fromhex(artifact)
    return _HEAD.pack(MAGIC, name, index, _check(name, index, data)) + data


def parse_chunk(frame: bytes) -> Chunk:
    """The chunk in a frame.

    Raises:
        TooLargeError: over the bound of the protocol.
        MalformedError: no chunk frame, or one whose hash does not fit its content.
    """
    if len(frame) > MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES:
        raise TooLargeError(
            f"a chunk frame of {len(frame)} bytes is over the bound of {MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES}"
        )
    if len(frame) <= FRAME_OVERHEAD_BYTES or not frame.startswith(MAGIC):
        raise MalformedError("not a chunk frame of this protocol")
    _, name, index, check = _HEAD.unpack_from(frame)
    data = frame[FRAME_OVERHEAD_BYTES:]
    if check != _check(name, index, data):
        raise MalformedError(f"chunk {index} of artifact {name.hex()} was damaged on its way")
    return Chunk(name.hex(), index, data)


def frames_for(data: bytes, ref: ArtifactRef, ranges: Iterable[tuple[int, int]] | None = None) -> Iterator[bytes]:
    """The frames of the granted chunks, in the order of the grants; of all chunks when `ranges` is None.

    Indices behind the last chunk are left out: a grant comes from the other side and is not to be trusted.
    """
    for first, count in [(0, ref.chunks)] if ranges is None else ranges:
        for index in range(first, min(first + count, ref.chunks)):
            yield chunk_frame(ref.id, index, data[index * ref.chunk_bytes : (index + 1) * ref.chunk_bytes])


class Receiver:
    """Puts one artifact together and says which chunks to ask for.

    Args:
        ref: the announced artifact; the caller has checked that its size is acceptable.
        window: how much may be under way.
        stall_s: with nothing for so long, granted chunks that did not come are granted again. On a slow link, which
            shows by the pauses between chunks, it takes longer: granted twice, they would go over the link twice.
    """

    def __init__(self, ref: ArtifactRef, window: Window | None = None, stall_s: float = 2.0) -> None:
        self._ref = ref
        limits = window or Window()
        self._credit = max(1, min(limits.chunks, limits.bytes // ref.chunk_bytes))
        self._stall_s = stall_s
        self._patience_s = stall_s
        self._have: dict[int, bytes] = {}
        self._granted: set[int] = set()
        self._next = 0  # every chunk below was received or granted since the last stall
        self._moved_at: float | None = None

    @property
    def ref(self) -> ArtifactRef:
        """The artifact being received."""
        return self._ref

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks received and chunks in all."""
        return len(self._have), self._ref.chunks

    @property
    def complete(self) -> bool:
        """Whether every chunk is here (their sum is checked by `data`)."""
        return len(self._have) == self._ref.chunks

    def feed(self, chunk: Chunk, now: float) -> bool:
        """Take a chunk, asked for or not; True when it brought something new.

        A chunk of another artifact and a repeated chunk change nothing.

        Raises:
            MalformedError: an index or a length that this artifact can't have.
        """
        if chunk.artifact != self._ref.id:
            return False
        if chunk.index >= self._ref.chunks:
            raise MalformedError(f"chunk {chunk.index} of an artifact of {self._ref.chunks} chunks")
        expected = min(self._ref.chunk_bytes, self._ref.size - chunk.index * self._ref.chunk_bytes)
        if len(chunk.data) != expected:
            raise MalformedError(f"chunk {chunk.index} has {len(chunk.data)} bytes instead of {expected}")
        self._arrived(now)
        if chunk.index in self._have:
            return False
        self._have[chunk.index] = chunk.data
        self._granted.discard(chunk.index)
        return True

    def next_need(self, now: float) -> Ranges | None:
        """Chunks to grant now as (first, count) pairs, or None when there is nothing to ask for at the moment.

        New grants wait until half of the window is free, so that one message grants several chunks.
        """
        if self.complete:
            return None
        if self._granted and self._moved_at is not None and now - self._moved_at >= self._patience_s:
            self._granted.clear()
            self._patience_s = min(2.0 * self._patience_s, MAX_STALL_S)
        if not self._granted:
            self._next = 0
        room = self._credit - len(self._granted)
        if self._granted and room < (self._credit + 1) // 2:
            return None
        fresh = self._take(room)
        if not fresh:
            return None
        self._granted.update(fresh)
        self._moved_at = now
        return _as_ranges(fresh)

    def data(self) -> bytes:
        """The whole artifact.

        Raises:
            MalformedError: not complete yet.
            IntegrityError: the chunks don't add up to the announced sha256; the receiver starts again from nothing.
        """
        if not self.complete:
            raise MalformedError("an artifact was read before all its chunks were there")
        data = b"".join(self._have[index] for index in range(self._ref.chunks))
        if hashlib.sha256(data).hexdigest() != self._ref.id:
            self._have.clear()
            self._granted.clear()
            self._next = 0
            raise IntegrityError(
                f"the chunks of artifact {self._ref.id} don't have its sha256; it must be fetched again"
            )
        return data

    def _arrived(self, now: float) -> None:
        gap = 0.0 if self._moved_at is None else now - self._moved_at
        self._patience_s = min(MAX_STALL_S, max(self._stall_s, GAP_FACTOR * gap, CALMING * self._patience_s))
        self._moved_at = now

    def _take(self, room: int) -> list[int]:
        fresh: list[int] = []
        while self._next < self._ref.chunks and len(fresh) < room:
            if self._next not in self._have and self._next not in self._granted:
                fresh.append(self._next)
            self._next += 1
        return fresh


def _check(name: bytes, index: int, data: bytes) -> bytes:
    return hashlib.sha256(b"".join((name, index.to_bytes(4, "big"), data))).digest()[:8]


def _as_ranges(indices: list[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and sum(ranges[-1]) == index:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((index, 1))
    return tuple(ranges)
