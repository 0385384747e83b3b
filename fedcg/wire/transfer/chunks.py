"""How an artifact crosses a link: cut into chunks, granted under a window, put together again.

Pure: no I/O, no threads, no clock of its own. A receiver grants chunks (`Need` messages, see `chunk_window`) and a sender sends
the granted ones; lost, repeated, reordered and foreign chunks do no harm. Broadcast chunks may be fed without any grant.
Receivers are in `partial_files`, senders in `chunk_sender`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from fedcg.wire.errors import MalformedError, TooLargeError, TransportError
from fedcg.wire.messages.messages import MAX_CHUNK_BYTES, ArtifactRef

MAGIC = b"FCGC"
_HEAD = struct.Struct(">4s32sI8s")
FRAME_OVERHEAD_BYTES = _HEAD.size
CHECK_BYTES = 8
MIN_CHUNK_BYTES = 256


@dataclass(frozen=True)
class Chunk:
    """One piece of an artifact; `index` counts from 0, `check` is the truncated hash that came with it."""

    artifact: str
    index: int
    data: bytes | memoryview
    check: bytes = field(default=b"", compare=False)


def chunk_bytes_for(max_payload: int, configured: int = MAX_CHUNK_BYTES) -> int:
    """The chunk size for a link: the smallest of the link's limit, the configured one and 120 KB, minus the frame's head.

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


def chunk_length(ref: ArtifactRef, index: int) -> int:
    """How many bytes a chunk of this artifact has."""
    return min(ref.chunk_bytes, ref.size - index * ref.chunk_bytes)


def chunk_check(artifact: str, index: int, data: bytes | memoryview) -> bytes:
    """The truncated hash of a chunk's name, place and content."""
    digest = hashlib.sha256(bytes.fromhex(artifact) + index.to_bytes(4, "big"))
    digest.update(data)
    return digest.digest()[:CHECK_BYTES]


def chunk_frame(artifact: str, index: int, data: bytes, check: bytes = b"") -> bytes:
    """The bytes of one chunk on the wire: magic, artifact id, index, truncated hash of all of it, data.

    `check` saves hashing where the same chunk was framed before.
    """
    return b"".join(
        (
            _HEAD.pack(MAGIC, bytes.fromhex(artifact), index, check or chunk_check(artifact, index, data)),
            data,
        )
    )


def read_frame(frame: bytes) -> Chunk:
    """The chunk in a frame, its content not yet compared with its hash: for a caller that checks the whole artifact. Copies nothing.

    Raises:
        TooLargeError: over the bound of the protocol.
        MalformedError: no chunk frame.
    """
    if len(frame) > MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES:
        raise TooLargeError(
            f"a chunk frame of {len(frame)} bytes is over the bound of {MAX_CHUNK_BYTES + FRAME_OVERHEAD_BYTES}"
        )
    if len(frame) <= FRAME_OVERHEAD_BYTES or not frame.startswith(MAGIC):
        raise MalformedError("not a chunk frame of this protocol")
    _, name, index, check = _HEAD.unpack_from(frame)
    return Chunk(name.hex(), index, memoryview(frame)[FRAME_OVERHEAD_BYTES:], check)


def parse_chunk(frame: bytes) -> Chunk:
    """The chunk in a frame.

    Raises:
        TooLargeError: over the bound of the protocol.
        MalformedError: no chunk frame, or one whose hash does not fit its content.
    """
    chunk = read_frame(frame)
    if chunk.check != chunk_check(chunk.artifact, chunk.index, chunk.data):
        raise MalformedError(f"chunk {chunk.index} of artifact {chunk.artifact} was damaged on its way")
    return chunk


def check_chunk(ref: ArtifactRef, chunk: Chunk) -> bool:
    """Whether a chunk is one of this artifact.

    Raises:
        MalformedError: it names this artifact, with an index or a length that the artifact can't have.
    """
    if chunk.artifact != ref.id:
        return False
    if chunk.index >= ref.chunks:
        raise MalformedError(f"chunk {chunk.index} of an artifact of {ref.chunks} chunks")
    expected = chunk_length(ref, chunk.index)
    if len(chunk.data) != expected:
        raise MalformedError(f"chunk {chunk.index} has {len(chunk.data)} bytes instead of {expected}")
    return True
