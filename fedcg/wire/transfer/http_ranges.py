"""The conventions of the HTTPS carrier for both sides: paths, and byte ranges of artifacts in headers.

A device gets the missing part of an artifact with `GET` and a `Range`, and puts the ranges of its update that a `need` names
with `PUT` and a `Content-Range`; the bytes are the artifact's own. Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fedcg.wire.errors import MalformedError, TooLargeError
from fedcg.wire.messages.messages import MAX_ARTIFACT_BYTES, ArtifactRef
from fedcg.wire.transfer.chunks import chunk_length

READY_PATH = "/v1/ready"
ARTIFACTS_PATH = "/v1/artifacts"
UPDATES_PATH = "/v1/updates"
STALL_S = 30.0
"""A connection on which nothing moves for so long is ended, by either side."""
_RANGE = re.compile(r"bytes=([0-9]{1,12})-([0-9]{0,12})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})")


@dataclass(frozen=True)
class Span:
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
        """The `Range` header that asks for it."""
        return f"bytes={self.first}-{self.last}"

    @property
    def content_range(self) -> str:
        """The `Content-Range` header that announces it."""
        return f"bytes {self.first}-{self.last}/{self.size}"

    def chunks(self, ref: ArtifactRef) -> Iterator[tuple[int, int]]:
        """The whole chunks that it consists of: (index, bytes).

        Raises:
            MalformedError: it is not of this artifact, or begins or ends inside a chunk.
        """
        ends = {self.size, -(-(self.last + 1) // ref.chunk_bytes) * ref.chunk_bytes}
        if self.size != ref.size or self.first % ref.chunk_bytes or self.last + 1 not in ends:
            raise MalformedError(
                f"{self.content_range} are no whole chunks of an artifact of {ref.size} bytes in chunks of {ref.chunk_bytes}"
            )
        first, end = self.first // ref.chunk_bytes, -(-(self.last + 1) // ref.chunk_bytes)
        return ((index, chunk_length(ref, index)) for index in range(first, end))


def span_of(ref: ArtifactRef, first: int, count: int) -> Span:
    """The bytes of `count` chunks from index `first` on; the last chunk of the artifact ends them."""
    return Span(first * ref.chunk_bytes, min((first + count) * ref.chunk_bytes, ref.size) - 1, ref.size)


def parse_range(text: str, size: int) -> Span:
    """The span that a `Range` header asks of an artifact of `size` bytes; an end behind the last byte means the last byte.

    Raises:
        TooLargeError: it begins behind the last byte.
        MalformedError: not one range that begins somewhere.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        raise MalformedError("Range must be bytes=FIRST- or bytes=FIRST-LAST")
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if first >= size:
        raise TooLargeError(f"the artifact has {size} bytes; byte {first} is not one of them")
    if last < first:
        raise MalformedError("Range ends before it begins")
    return Span(first, last, size)


def parse_content_range(text: str) -> Span:
    """The span that a `Content-Range` header announces.

    Raises:
        TooLargeError: of an artifact over the bound of the protocol.
        MalformedError: no such header, or its numbers contradict each other.
    """
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise MalformedError("Content-Range must be bytes FIRST-LAST/SIZE")
    span = Span(int(match[1]), int(match[2]), int(match[3]))
    if span.size > MAX_ARTIFACT_BYTES:
        raise TooLargeError(f"an artifact of {span.size} bytes is over the bound of {MAX_ARTIFACT_BYTES}")
    if not span.first <= span.last < span.size:
        raise MalformedError(f"{text} is no part of an artifact")
    return span
