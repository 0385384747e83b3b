"""The actual content of an artifact, for an observer that trusts neither side.

Unlike `artifacts.unpack`, this expects no layout: all tensors, parts and header fields are reported. `decode` decodes tensors by the
codecs in the header, and leaves those that do not match their codec unchanged.
"""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import decompress_payload, header_fields, split_artifact
from fedcg.wire.artifacts.payload import ELEMENT_TYPES, RawTensor, decode_tensor, read_payload, stored_tensors
from fedcg.wire.errors import IntegrityError, MalformedError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES
from fedcg.wire.parts import TensorCodec, is_delta

# safetensors names an element type by its kind and its bits, numpy by its kind and its bytes.
_DTYPES = {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)}
_DTYPES |= {f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)} | {"BOOL": "?"}


class Inspection(Value):
    """The content of an artifact.

    Attributes:
        header: the received JSON of the header, unknown fields included.
        tensors: every tensor by its full key ("part/name" if it follows the rules).
        payload: the decompressed payload, for a search in raw bytes.
    """

    header: Mapping[str, object]
    tensors: Mapping[str, npt.NDArray[Any]]
    payload: bytes

    @property
    def part_names(self) -> frozenset[str]:
        """The part names that occur, as raw strings; a key without a slash counts as a separate part."""
        return frozenset(key.partition("/")[0] for key in self.tensors)

    @property
    def codecs(self) -> Mapping[str, TensorCodec]:
        """The known codecs that the header names, by key."""
        named = self.header.get("codecs")
        known: Mapping[str, TensorCodec] = {name: name for name in get_args(TensorCodec)}
        found = named.items() if isinstance(named, dict) else ()
        return {str(key): known[codec] for key, codec in found if isinstance(codec, str) and codec in known}

    @property
    def report_fields(self) -> frozenset[str]:
        """The names of the report's fields that carry a value."""
        report = self.header.get("report")
        carried = report.items() if isinstance(report, dict) else ()
        return frozenset(name for name, value in carried if value is not None)

    @property
    def facts(self) -> dict[str, object]:
        """The facts in the header besides the report: versions, processor, threads."""
        found = (self.header.get(name) for name in ("versions", "determinism"))
        return {name: value for facts in found if isinstance(facts, dict) for name, value in facts.items()}


class Decoded(Value):
    """An artifact's tensors as the receiver decodes them.

    Attributes:
        tensors: by key; those that the header describes wrongly or not at all are unchanged, with their scales.
        without_base: keys of differences whose base is not available: their numbers are the differences themselves.
    """

    tensors: Mapping[str, npt.NDArray[Any]]
    without_base: frozenset[str]


def decode(seen: Inspection, base: Inspection | None = None) -> Decoded:
    """The tensors of an artifact, decoded by the codecs in its header.

    Args:
        seen: the artifact.
        base: the artifact that its header names as its base, if it is available.
    """
    bases = {} if base is None else decode(base).tensors
    tensors, without_base = dict(seen.tensors), set()
    for key, codec in seen.codecs.items():
        pieces = _pieces(seen, key, codec)
        if pieces is None:
            continue
        start = bases.get(key)
        if start is None or start.shape != pieces[""].shape or start.dtype != np.float32:
            start = np.zeros(pieces[""].shape, np.float32)
            without_base |= {key} if is_delta(codec) else set()
        try:
            tensors[key] = decode_tensor(key, pieces, codec, start)
        except IntegrityError:
            continue  # a scale that no encoder writes: show the pieces unchanged
        for suffix in pieces.keys() - {""}:
            del tensors[key + suffix]
    return Decoded(tensors, frozenset(without_base))


def _pieces(seen: Inspection, key: str, codec: TensorCodec) -> Mapping[str, npt.NDArray[Any]] | None:
    """The stored pieces of a tensor, by suffix; None if they do not match its codec."""
    if key not in seen.tensors or (codec.startswith("i8") and seen.tensors[key].ndim == 0):
        return None
    expected = stored_tensors(seen.tensors[key].shape, codec)
    pieces = {suffix: seen.tensors[key + suffix] for suffix in expected if key + suffix in seen.tensors}
    is_whole = pieces.keys() == expected.keys() and all(
        (piece.dtype, piece.shape) == (ELEMENT_TYPES[expected[suffix].dtype], expected[suffix].shape)
        for suffix, piece in pieces.items()
    )
    return pieces if is_whole else None


def inspect(data: bytes, max_bytes: int = MAX_ARTIFACT_BYTES) -> Inspection:
    """Decode the content of an artifact.

    Args:
        data: the bytes of the artifact.
        max_bytes: bound on the decompressed payload.

    Raises:
        TooLargeError: a bound was passed.
        MalformedError: bytes that are not an artifact, or tensors of an unknown element type.
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
