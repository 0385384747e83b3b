"""What is really inside an artifact, for an observer who trusts neither side.

Unlike `artifacts.unpack`, no layout is expected: whatever tensors, parts and header fields are there get reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcg.wire.container import decompress_payload, header_fields, split_artifact
from fedcg.wire.errors import MalformedError
from fedcg.wire.messages import MAX_ARTIFACT_BYTES
from fedcg.wire.tensors import RawTensor, read_payload

_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}


@dataclass(frozen=True)
class Inspection:
    """What an artifact holds.

    Attributes:
        header: the header's JSON as it came, unknown fields included.
        tensors: every tensor by its full key ("part/name" where it follows the rules).
        payload: the decompressed payload, for a search in raw bytes.
    """

    header: Mapping[str, object]
    tensors: Mapping[str, npt.NDArray[Any]]
    payload: bytes

    @property
    def part_names(self) -> frozenset[str]:
        """The part names that occur, as raw strings; a key without a slash counts as a part of its own."""
        return frozenset(key.partition("/")[0] for key in self.tensors)

    @property
    def report_fields(self) -> frozenset[str]:
        """The names of the report's fields that carry a value."""
        report = self.header.get("report")
        return (
            frozenset(name for name, value in report.items() if value is not None)
            if isinstance(report, dict)
            else frozenset()
        )


def inspect(data: bytes, max_bytes: int = MAX_ARTIFACT_BYTES) -> Inspection:
    """Decode whatever is in an artifact.

    Args:
        data: the bytes of the artifact.
        max_bytes: bound on the decompressed payload.

    Raises:
        TooLargeError: a bound was passed.
        MalformedError: bytes that are no artifact, or tensors of an element type that nobody can read.
    """
    payload = decompress_payload(split_artifact(data)[1], max_bytes)
    tensors = {key: _array(key, entry) for key, entry in sorted(read_payload(payload).items())}
    return Inspection(header_fields(data), tensors, payload)


def _array(key: str, entry: RawTensor) -> npt.NDArray[Any]:
    raw, dtype, shape = bytes(entry["data"]), entry["dtype"], entry["shape"]
    if dtype == "BF16":
        wide = np.frombuffer(raw, dtype="<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    if dtype not in _DTYPES:
        raise MalformedError(f"tensor {key} has element type {dtype}, which can't be read")
    return np.frombuffer(raw, dtype=_DTYPES[dtype]).reshape(shape)
