"""Splits an artifact for a link: chunk frames over MQTT, byte ranges of whole chunks over HTTPS.

Lost, repeated, reordered and foreign chunks do no harm. Pure: no I/O, no threads, no clock. `windows` selects the chunks to request,
`chunk_sender` sends, `partial_files` receives.
"""

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import field

from fedcg.values import Value
from fedcg.wire.errors import MalformedError, TooLargeError, TransportError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, MAX_CHUNK_BYTES, ArtifactRef

MAGIC = b"FCGC"
_HEAD = struct.Struct(">4s32sI8s")
FRAME_OVERHEAD_BYTES = _HEAD.size
CHECK_BYTES = 8
MIN_CHUNK_BYTES = 256


class Chunk(Value):
    """One piece of an artifact; `index` counts from 0, `check` is the received truncated hash."""

    artifact: str
    index: int
    data: bytes | memoryview
    check: bytes = field(default=b"", compare=False)


def chunk_bytes_for(max_payload: int, configured: int = MAX_CHUNK_BYTES) -> int:
    """The chunk size for a link: the smallest of the link's limit, the configured one and 120 KB, minus the frame's head.

    Raises:
        TransportError: the link's limit is too small for any chunk.
    """
    size = min(max_payload, configured, MAX_CHUNK_BYTES) - FRAME_OVERHEAD_BYTES
    if size < MIN_CHUNK_BYTES:
        raise TransportError(
            f"the link takes payloads of {max_payload} bytes, too small for a chunk of {MIN_CHUNK_BYTES}; "
            "raise the broker's maximum packet size or the configured chunk size"
        )
    return size


def chunk_length(ref: ArtifactRef, index: int) -> int:
    """The number of bytes in a chunk of this artifact."""
    return min(ref.chunk_bytes, ref.size - index * ref.chunk_bytes)


def chunk_check(artifact: str, index: int, data: bytes | memoryview) -> bytes:
    """The truncated hash of a chunk's artifact, index and content."""
    digest = hashlib.sha256(bytes.fromhex(artifact) + index.to_bytes(4, "big"))
    digest.update(data)
    return digest.digest()[:CHECK_BYTES]


def chunk_frame(artifact: str, index: int, data: bytes, check: bytes = b"") -> bytes:
    """The bytes of one chunk on the wire: magic, artifact id, index, truncated hash of them and the data, data.

    `check` saves hashing if the same chunk was framed before.
    """
    return b"".join(
        (_HEAD.pack(MAGIC, bytes.fromhex(artifact), index, check or chunk_check(artifact, index, data)), data)
    )


def read_frame(frame: bytes) -> Chunk:
    """The chunk in a frame, without a check of its hash: for a caller that checks the whole artifact. Does not copy.

    Raises:
        TooLargeError: over the bound of the protocol.
        MalformedError: not a chunk frame.
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
        MalformedError: not a chunk frame, or its hash does not match its content.
    """
    chunk = read_frame(frame)
    if chunk.check != chunk_check(chunk.artifact, chunk.index, chunk.data):
        raise MalformedError(f"chunk {chunk.index} of artifact {chunk.artifact} was damaged in transit")
    return chunk


def check_chunk(ref: ArtifactRef, chunk: Chunk) -> bool:
    """Whether a chunk belongs to this artifact.

    Raises:
        MalformedError: it names this artifact, but has an index or a length that the artifact can't have.
    """
    if chunk.artifact != ref.id:
        return False
    if chunk.index >= ref.chunks:
        raise MalformedError(f"chunk {chunk.index} of an artifact of {ref.chunks} chunks")
    expected = chunk_length(ref, chunk.index)
    if len(chunk.data) != expected:
        raise MalformedError(f"chunk {chunk.index} has {len(chunk.data)} bytes instead of {expected}")
    return True


READY_PATH = "/v1/ready"
ARTIFACTS_PATH = "/v1/artifacts"
UPDATES_PATH = "/v1/updates"
HTTPS_STALL_S = 30.0
"""Either side ends a connection without progress for this time."""
_RANGE = re.compile(r"bytes=([0-9]{1,12})-([0-9]{0,12})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})")


class Span(Value):
    """Bytes `first` to `last`, both included, of an artifact of `size` bytes."""

    first: int
    last: int
    size: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.last - self.first + 1

    @property
    def range(self) -> str:
        """The `Range` header that requests it."""
        return f"bytes={self.first}-{self.last}"

    @property
    def content_range(self) -> str:
        """The `Content-Range` header that announces it."""
        return f"bytes {self.first}-{self.last}/{self.size}"

    def chunks(self, ref: ArtifactRef) -> Iterator[tuple[int, int]]:
        """Its whole chunks: (index, bytes).

        Raises:
            MalformedError: it is of another artifact, or starts or ends inside a chunk.
        """
        ends = {self.size, -(-(self.last + 1) // ref.chunk_bytes) * ref.chunk_bytes}
        if self.size != ref.size or self.first % ref.chunk_bytes or self.last + 1 not in ends:
            raise MalformedError(
                f"{self.content_range} does not match whole chunks of an artifact of {ref.size} bytes in chunks of {ref.chunk_bytes}"
            )
        first, end = self.first // ref.chunk_bytes, -(-(self.last + 1) // ref.chunk_bytes)
        return ((index, chunk_length(ref, index)) for index in range(first, end))


def span_of(ref: ArtifactRef, first: int, count: int) -> Span:
    """The bytes of `count` chunks from index `first` on, at most to the end of the artifact."""
    return Span(first * ref.chunk_bytes, min((first + count) * ref.chunk_bytes, ref.size) - 1, ref.size)


def parse_range(text: str, size: int) -> Span:
    """The span that a `Range` header requests from an artifact of `size` bytes; an end after the last byte means the last byte.

    Raises:
        TooLargeError: it starts after the last byte.
        MalformedError: not exactly one range with a start.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        raise MalformedError("Range must be bytes=FIRST- or bytes=FIRST-LAST")
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if first >= size:
        raise TooLargeError(f"the artifact has {size} bytes; byte {first} is after its end")
    if last < first:
        raise MalformedError("Range ends before it begins")
    return Span(first, last, size)


def parse_content_range(text: str) -> Span:
    """The span that a `Content-Range` header announces.

    Raises:
        TooLargeError: an artifact over the bound of the protocol.
        MalformedError: not such a header, or its numbers contradict each other.
    """
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise MalformedError("Content-Range must be bytes FIRST-LAST/SIZE")
    span = Span(int(match[1]), int(match[2]), int(match[3]))
    if span.size > MAX_ARTIFACT_BYTES:
        raise TooLargeError(f"an artifact of {span.size} bytes is over the bound of {MAX_ARTIFACT_BYTES}")
    if not span.first <= span.last < span.size:
        raise MalformedError(f"{text} is not a range of an artifact")
    return span
