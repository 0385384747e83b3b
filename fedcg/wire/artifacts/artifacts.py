"""Artifacts: a header and a payload of tensors in one blob, named by the sha256 of its bytes.

The format: magic, length of the header (u32, big endian), header JSON, one zstd frame. Every size is checked before memory is
allocated. `artifact_store` stores artifacts, `inspection` reads them without a layout.
"""

import hashlib
import json
import struct
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import zstandard
from pydantic import BaseModel, Field, ValidationError

from fedcg.values import Value
from fedcg.wire.artifacts.payload import (
    Array,
    Codecs,
    PartArrays,
    decode_tensors,
    encode_tensors,
    layouts_of,
    max_payload_bytes,
    tensor_codec,
    tensor_key,
)
from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError, UnknownBaseError, problem_in
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, MAX_SUM_GROUPS, Count, Identifier, SealedSum, Sha256
from fedcg.wire.parts import Part, PartLayouts, Report, TensorCodec, UpdateCodec, is_delta

MAGIC = b"FCGA"
MAX_HEADER_BYTES = 1024 * 1024
_PREFIX = struct.Struct(">4sI")
_LEVEL = 3  # compression saves 8 % of weights at any level; 3 is zstd's fast default


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
    """Header bytes and compressed payload of an artifact, not parsed.

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
        raise MalformedError("an artifact is truncated")
    return data[_PREFIX.size : _PREFIX.size + length], data[_PREFIX.size + length :]


def decompress_payload(frame: bytes, max_bytes: int) -> bytes:
    """The content of exactly one zstd frame that declares its size.

    Raises:
        TooLargeError: it declares more than `max_bytes`; nothing was decompressed.
        MalformedError: not a frame, no declared size, a size that differs from it, or bytes after the frame.
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
        MalformedError: not an artifact, or a header that is not a JSON object.
    """
    try:
        fields = json.loads(split_artifact(data)[0])
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's parser
        raise MalformedError("an artifact header is not JSON") from error
    if not isinstance(fields, dict):
        raise MalformedError("an artifact header is not a JSON object")
    return fields


_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Line = Annotated[str, Field(pattern=r"^[ -~]{0,120}$")]
_Lines = Annotated[dict[_Word, _Line], Field(max_length=32)]


class ArtifactHeader(BaseModel, frozen=True, extra="forbid", strict=True):
    """The header of an artifact, such as an update; the tensors follow it.

    Attributes:
        client: that created it; "coordinator" for an aggregate.
        base: sha256 of the aggregate that the local round started from, or None; deltas refer to its decoded tensors.
        label_distribution: the published p(y), one number per class.
        sums: of an aggregate, the data with which the cohort opens its part `sealed`: one for each group of devices.
        codecs: the codec of each tensor ("part/name"); `pack` fills it in.
        versions, determinism: the facts needed for a bit-identical repetition; given by the caller.
    """

    format: Literal[1] = 1
    kind: Literal["update", "aggregate"]
    method: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    federation: Identifier
    round: Count
    attempt: Count
    client: Identifier
    base: Sha256 | None = None
    report: Report | None = None
    label_distribution: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)], ...], Field(max_length=10_000)] | None
    ) = None
    sums: Annotated[tuple[SealedSum, ...], Field(max_length=2 * MAX_SUM_GROUPS, exclude_if=lambda sums: not sums)] = ()
    codecs: dict[str, TensorCodec] = {}
    versions: _Lines = {}
    determinism: _Lines = {}

    def canonical(self) -> bytes:
        """The bytes of the header in an artifact: sorted-key JSON without spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


class Artifact(Value):
    """A decoded artifact."""

    header: ArtifactHeader
    parts: dict[Part, dict[str, Array]]


def artifact_id(data: bytes) -> str:
    """The name of an artifact: sha256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


class Base(Value):
    """A decoded aggregate that deltas refer to, and the sha256 of its artifact."""

    id: str
    parts: PartArrays


def codecs_for(
    layouts: PartLayouts, codec: UpdateCodec = "f32", with_base: Collection[Part] = frozenset()
) -> dict[str, TensorCodec]:
    """The codec of each tensor ("part/name") of an artifact.

    Args:
        layouts: its tensors.
        codec: the codec chosen for the artifact.
        with_base: parts that have a base; all others are coded by value.
    """
    return {
        tensor_key(part, layout.name): tensor_codec(layout, codec, has_base=part in with_base)
        for part, tensors in layouts.items()
        for layout in tensors
    }


def parts_in(header: ArtifactHeader) -> frozenset[Part]:
    """The parts that an artifact's header names.

    Raises:
        MalformedError: a name that is not a part.
    """
    try:
        return frozenset(Part(key.partition("/")[0]) for key in header.codecs)
    except ValueError as error:
        raise MalformedError(f"an artifact header names something other than parts: {error}") from error


def pack(header: ArtifactHeader, parts: PartArrays, codec: UpdateCodec = "f32", base: Base | None = None) -> bytes:
    """The bytes of an artifact; the same arguments always give the same bytes.

    Args:
        header: its codecs are filled in.
        parts: the tensors.
        codec: of the artifact.
        base: for a delta codec: its parts are coded as the difference to it, all others by value.

    Raises:
        MalformedError: an element type that the wire does not carry.
        CodecError: a number that the codec can't hold.
        IntegrityError: a part of the base lacks a tensor.
        UnknownBaseError: the header names another base.
        TooLargeError: the header or the artifact is over its bound.
    """
    codecs = codecs_for(layouts_of(parts), codec, frozenset() if base is None else frozenset(base.parts))
    payload = encode_tensors(parts, codecs, _known_base(header, codecs, base))
    head = header.model_copy(update={"codecs": codecs}).canonical()
    return join_artifact(head, payload)


def read_header(data: bytes) -> ArtifactHeader:
    """The header of an artifact; the tensors are not read.

    Raises:
        TooLargeError: the header is over its bound.
        MalformedError: not an artifact, an invalid header, or a header that is not in canonical form (which could hide bits).
    """
    head, _ = split_artifact(data)
    try:
        header = ArtifactHeader.model_validate_json(head, strict=True)
    except ValidationError as error:
        raise MalformedError(f"artifact header field {problem_in(error)}") from error
    if header.canonical() != head:
        raise MalformedError("an artifact header is not in canonical form")
    return header


def unpack(
    data: bytes,
    layouts: PartLayouts,
    max_bytes: int = MAX_ARTIFACT_BYTES,
    *,
    codecs: Codecs | None = None,
    base: Base | None = None,
) -> Artifact:
    """The decoded artifact in `data`; its tensors must be exactly those of the layouts.

    Args:
        data: the bytes of the artifact.
        layouts: exactly the parts and tensors that must be inside.
        max_bytes: bound on the artifact and on its decompressed payload.
        codecs: exactly the codecs that it must have; None: any that can hold its tensors.
        base: the aggregate that its deltas refer to.

    Raises:
        TooLargeError: over a bound; nothing of that size was allocated.
        MalformedError: bytes that are not an artifact.
        IntegrityError: tensors, element types, shapes or codecs that are not the expected ones.
        UnknownBaseError: it holds deltas to an aggregate that was not given.
    """
    if len(data) > max_bytes:
        raise TooLargeError(f"an artifact of {len(data)} bytes is over the bound of {max_bytes}")
    header = read_header(data)
    largest = max_payload_bytes(layouts, header.codecs)
    if codecs is not None and header.codecs != codecs:
        strange = sorted(set(header.codecs.items()) ^ set(codecs.items()))
        raise IntegrityError(f"its tensors are not coded as they must be here: {strange[:5]}")
    known = _known_base(header, header.codecs, base)
    payload = decompress_payload(split_artifact(data)[1], min(largest, max_bytes))
    return Artifact(header, decode_tensors(payload, layouts, header.codecs, known))


def _known_base(header: ArtifactHeader, codecs: Codecs, base: Base | None) -> PartArrays | None:
    """The base of the deltas; None without deltas.

    Raises:
        UnknownBaseError: it is not the aggregate that the header names.
    """
    if not any(map(is_delta, codecs.values())):
        return None
    if base is None or base.id != header.base:
        at_hand = "none is" if base is None else f"{base.id} is"
        raise UnknownBaseError(f"it is coded as the difference to aggregate {header.base}, but {at_hand} available")
    return base.parts
