"""The outer form of an artifact: magic, length of the header (u32, big endian), header JSON, one zstd frame.

Every size is bounded before memory is taken for it. Knows nothing of what header and payload mean (`artifacts`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import zstandard

from fedcg.wire.errors import MalformedError, TooLargeError
from fedcg.wire.messages.messages import MAX_ARTIFACT_BYTES

MAGIC = b"FCGA"
MAX_HEADER_BYTES = 1024 * 1024
_PREFIX = struct.Struct(">4sI")
_LEVEL = 3  # weights save 8 % at any level; 3 is zstd's fast default


def join_artifact(head: bytes, payload: bytes) -> bytes:
    """The bytes of an artifact with this header and this payload, compressed; deterministic.

    Raises:
        TooLargeError: the header or the artifact is over its bound.
    """
    if len(head) > MAX_HEADER_BYTES:
        raise TooLargeError(f"an artifact header of {len(head)} bytes is over the bound of {MAX_HEADER_BYTES}")
    data = _PREFIX.pack(MAGIC, len(head)) + head + zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
    if len(data) > MAX_ARTIFACT_BYTES:
        raise TooLargeError(f"an artifact of {len(data)} bytes is over the bound of {MAX_ARTIFACT_BYTES}")
    return data


def split_artifact(data: bytes) -> tuple[bytes, bytes]:
    """Header bytes and compressed payload of an artifact, not looked into.

    Raises:
        TooLargeError: the header is over its bound.
        MalformedError: no artifact.
    """
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        raise MalformedError("not an artifact of this protocol")
    _, length = _PREFIX.unpack_from(data)
    if length > MAX_HEADER_BYTES:
        raise TooLargeError(f"an artifact header of {length} bytes is over the bound of {MAX_HEADER_BYTES}")
    if _PREFIX.size + length > len(data):
        raise MalformedError("an artifact is cut short")
    return data[_PREFIX.size : _PREFIX.size + length], data[_PREFIX.size + length :]


def decompress_payload(frame: bytes, max_bytes: int) -> bytes:
    """The content of exactly one zstd frame that declares its size.

    Raises:
        TooLargeError: it declares more than `max_bytes`; nothing was decompressed.
        MalformedError: no frame, no declared size, another size than declared, or bytes after the frame.
    """
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise MalformedError("a compressed payload does not declare its size")
        if declared > max_bytes:
            raise TooLargeError(f"a payload declares {declared} bytes; at most {max_bytes} are allowed here")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedError(f"a compressed payload is damaged: {error}") from error
    if len(content) != declared:
        raise MalformedError(f"a payload declares {declared} bytes and has {len(content)}")
    return content


def header_fields(data: bytes) -> Mapping[str, object]:
    """The header as plain JSON, unknown fields included: for an observer that must see unexpected fields.

    Raises:
        MalformedError: no artifact, or a header that is not a JSON object.
    """
    try:
        fields = json.loads(split_artifact(data)[0])
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's parser
        raise MalformedError("an artifact header is not JSON") from error
    if not isinstance(fields, dict):
        raise MalformedError("an artifact header is not a JSON object")
    return fields
