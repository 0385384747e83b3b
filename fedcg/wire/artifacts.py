"""Artifacts: a header and tensors in one blob that is named by the sha256 of its bytes.

The blob's outer form is `container`'s business, where blobs are kept `artifact_store`'s, how they travel `transfer`'s;
`inspection` looks into them without expecting anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcg.wire.artifact_store import ArtifactStore
from fedcg.wire.container import decompress_payload, join_artifact, split_artifact
from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError
from fedcg.wire.inspection import Inspection, inspect
from fedcg.wire.messages import MAX_ARTIFACT_BYTES, Identifier, Sha256
from fedcg.wire.parts import Part, PartLayouts, Report
from fedcg.wire.tensors import Array, PartArrays, decode_tensors, encode_tensors, flatten, payload_bounds, tensor_key

__all__ = [
    "Artifact",
    "ArtifactHeader",
    "ArtifactStore",
    "Inspection",
    "artifact_id",
    "codecs_for",
    "inspect",
    "pack",
    "read_header",
    "unpack",
]

Codec = Literal["f32", "i64"]
_CODECS: dict[str, Codec] = {"float32": "f32", "int64": "i64"}
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Line = Annotated[str, Field(pattern=r"^[ -~]{0,120}$")]
_Lines = Annotated[dict[_Word, _Line], Field(max_length=32)]


class ArtifactHeader(BaseModel):
    """What an artifact says about itself.

    Attributes:
        client: who made it; "coordinator" for an aggregate.
        base: sha256 of the aggregate that the local round started from, or None.
        label_distribution: the published p(y), one number per class.
        codecs: how each tensor ("part/name") is coded; `pack` fills it in when it is left empty.
        versions, determinism: what a repetition with the same bits needs; given by the caller.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    kind: Literal["update", "aggregate"]
    method: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    federation: Identifier
    round: Annotated[int, Field(ge=0, le=1 << 53)]
    attempt: Annotated[int, Field(ge=0, le=1 << 53)]
    client: Identifier
    base: Sha256 | None = None
    report: Report | None = None
    label_distribution: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)], ...], Field(max_length=10_000)] | None
    ) = None
    codecs: dict[str, Codec] = {}
    versions: _Lines = {}
    determinism: _Lines = {}

    def canonical(self) -> bytes:
        """The bytes of the header in an artifact: sorted-key JSON without spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Artifact:
    """A decoded artifact."""

    header: ArtifactHeader
    parts: dict[Part, dict[str, Array]]


def artifact_id(data: bytes) -> str:
    """The name of an artifact: sha256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def codecs_for(parts: PartArrays) -> dict[str, Codec]:
    """The codec of each tensor, by value: `f32` for float32, `i64` for int64."""
    return {key: _CODECS[str(array.dtype)] for key, array in flatten(parts).items()}


def pack(header: ArtifactHeader, parts: PartArrays) -> bytes:
    """The bytes of an artifact; the same header and tensors always give the same bytes.

    Raises:
        MalformedError: an element type that the wire does not carry, or codecs that are not those of the tensors.
        TooLargeError: the header or the artifact is over its bound.
    """
    payload = encode_tensors(parts)
    codecs = codecs_for(parts)
    if header.codecs and header.codecs != codecs:
        raise MalformedError(
            "the header's codecs are not those of the tensors; leave them empty to have them filled in"
        )
    head = header.model_copy(update={"codecs": codecs}).canonical()
    return join_artifact(head, payload)


def read_header(data: bytes) -> ArtifactHeader:
    """The header of an artifact; the tensors are not touched.

    Raises:
        TooLargeError: the header is over its bound.
        MalformedError: no artifact, no valid header, or a header that is not in canonical form (which could hide bits).
    """
    head, _ = split_artifact(data)
    try:
        header = ArtifactHeader.model_validate_json(head, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise MalformedError(f"artifact header field {where or '(root)'}: {first['msg']}") from error
    if header.canonical() != head:
        raise MalformedError("an artifact header is not in canonical form")
    return header


def unpack(data: bytes, layouts: PartLayouts, max_bytes: int = MAX_ARTIFACT_BYTES) -> Artifact:
    """The artifact in `data`, whose tensors must be exactly those of the layouts.

    Args:
        data: the bytes of the artifact.
        layouts: exactly the parts and tensors that must be inside.
        max_bytes: bound on the artifact and on its decompressed payload.

    Raises:
        TooLargeError: over a bound; nothing of that size was allocated.
        MalformedError: bytes that are no artifact.
        IntegrityError: tensors, element types, shapes or codecs that are not those of the layouts.
    """
    if len(data) > max_bytes:
        raise TooLargeError(f"an artifact of {len(data)} bytes is over the bound of {max_bytes}")
    header = read_header(data)
    expected = {
        tensor_key(part, layout.name): _CODECS[layout.dtype] for part, tensors in layouts.items() for layout in tensors
    }
    if header.codecs != expected:
        strange = sorted(set(header.codecs.items()) ^ set(expected.items()))
        raise IntegrityError(f"the header's tensors are not those of the layouts: {strange[:5]}")
    smallest, largest = payload_bounds(layouts)
    payload = decompress_payload(split_artifact(data)[1], min(largest, max_bytes))
    if len(payload) < smallest:
        raise IntegrityError(f"a payload of {len(payload)} bytes; the layouts need {smallest}")
    return Artifact(header, decode_tensors(payload, layouts))
