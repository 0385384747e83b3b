"""The payload of an artifact: converts numpy arrays of named parts to safetensors and back, each with its codec, within agreed layouts.

Torch-free, no pickle. This module must not know headers, compression or files (`artifacts`).

| codec | a float32 tensor's payload |
|---|---|
| `f32` | its numbers |
| `f16` | its numbers as float16 |
| `i8` | one byte per number, and one float32 scale per channel (row of the first axis) under the key with `SCALE_SUFFIX` |
| `f16-delta`, `i8-delta` | the same for the difference to the base, the decoded tensor that sender and receiver both hold |
| `i64`, `u32` | for an int64 or uint32 tensor: its numbers |

An artifact's codec applies to each large float32 tensor; `tensor_codec` gives the codec of the others. Laws (property-tested), for finite
x, with x' = decode(encode(x)), base b (0 by value), d = x - b, ε = 2^-23:

  * `f32`, `i64`, `u32`: x' = x, bit for bit;
  * `f16`: |x - x'| <= 2^-11 |d| + 2^-25 + ε |x'|; a |d| of 65520 or more does not fit into float16 and is refused, never sent as infinity;
  * `i8`: |x - x'| <= s/2 + ε (|x'| + s) + 2^-149, where s is the channel's scale, the least float32 of at least max |d| / 127;
  * the same numbers always give the same bytes: everything is computed in float64 and rounded once, halves to even;
  * a payload holds exactly the tensors that `stored_tensors` names.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fedcg.values import Value
from fedcg.wire.errors import CodecError, IntegrityError, MalformedError, TooLargeError
from fedcg.wire.parts import Part, PartLayouts, TensorCodec, TensorDtype, TensorLayout, UpdateCodec, is_delta

SCALE_SUFFIX = ":scale"
"""No tensor can have this name: names in a layout have letters, digits, "_" and "."."""
MIN_CHANNEL = 8
"""On shorter channels, a scale and one byte per number save little, and exact biases and statistics matter."""
F16_LIMIT = 65520.0
"""The smallest number that float16 can't hold."""
_LEVELS = 127
_LARGEST = float(np.finfo(np.float32).max)

Numbers = npt.NDArray[np.float64]
Pieces = Mapping[str, npt.NDArray[Any]]
"""The stored pieces of one tensor, by the suffix of its key; the tensor itself under ""."""


class Stored(Value):
    """One tensor of a payload: safetensors' name of its element type, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of its elements."""
        return ELEMENT_TYPES[self.dtype].itemsize * math.prod(self.shape)


ELEMENT_TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I8": np.dtype("i1"),
    "I64": np.dtype("<i8"),
    "U32": np.dtype("<u4"),
}

_EXACT = frozenset({"f32", "i64", "u32"})
_OF_INTEGERS: Mapping[TensorDtype, TensorCodec] = {"int64": "i64", "uint32": "u32"}
_BY_VALUE: Mapping[UpdateCodec, TensorCodec] = {"f16-delta": "f16", "i8-delta": "i8"}


def tensor_codec(layout: TensorLayout, codec: UpdateCodec, *, has_base: bool) -> TensorCodec:
    """The codec of one tensor in an artifact with `codec`.

    Integers and 0-d tensors stay exact. So does a float32 tensor with fewer than `MIN_CHANNEL` numbers per row of its first axis
    (biases, batch norm's weights and statistics): they have few bytes and matter much.

    Args:
        layout: the tensor.
        codec: the artifact's.
        has_base: whether the tensor's part has a base; without one a delta codec codes by value.
    """
    if layout.dtype in _OF_INTEGERS:
        return _OF_INTEGERS[layout.dtype]
    if math.prod(layout.shape[1:]) < MIN_CHANNEL or len(layout.shape) < 2:
        return "f32"
    if is_delta(codec) and not has_base:
        return _BY_VALUE[codec]
    return codec


def fits(layout: TensorLayout, codec: TensorCodec) -> bool:
    """Whether a codec can hold a tensor of this layout."""
    if layout.dtype in _OF_INTEGERS or codec in _OF_INTEGERS.values():
        return _OF_INTEGERS.get(layout.dtype) == codec
    return not codec.startswith("i8") or len(layout.shape) > 0


def stored_tensors(shape: tuple[int, ...], codec: TensorCodec) -> dict[str, Stored]:
    """The pieces of a tensor of this shape in a payload, by the suffix of its key."""
    stored = {"": Stored(codec.partition("-")[0].upper(), shape)}
    return stored | {SCALE_SUFFIX: Stored("F32", shape[:1])} if codec.startswith("i8") else stored


def encode_tensor(key: str, array: npt.NDArray[Any], codec: TensorCodec, base: npt.NDArray[Any] | None) -> Pieces:
    """The stored pieces of a tensor.

    Args:
        key: its name, for messages.
        array: float32, int64 or uint32, finite where the codec is not exact.
        codec: one that fits it.
        base: of the same shape, for a delta codec.

    Raises:
        CodecError: a number that the codec can't hold.
    """
    if codec in _EXACT:
        return {"": array}
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise CodecError(f"tensor {key} holds NaN or infinity, which {codec} can't hold")
    if is_delta(codec):
        assert base is not None
        numbers -= base
    return _encode_i8(numbers) if codec.startswith("i8") else {"": _to_f16(key, numbers)}


def decode_tensor(key: str, pieces: Pieces, codec: TensorCodec, base: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """The tensor in stored pieces, in separate memory; arguments as for `encode_tensor`.

    Raises:
        IntegrityError: a scale that no encoder writes.
    """
    if codec in _EXACT:
        return np.array(pieces[""])
    numbers = _decode_i8(key, pieces) if codec.startswith("i8") else pieces[""].astype(np.float64)
    if is_delta(codec):
        assert base is not None
        numbers = numbers + base
    if codec.startswith("i8"):  # scales round up, so the largest float32 could be decoded as infinity
        numbers = np.clip(numbers, -_LARGEST, _LARGEST)
    single: npt.NDArray[np.float32] = numbers.astype(np.float32)
    return single


def _to_f16(key: str, numbers: Numbers) -> npt.NDArray[np.float16]:
    largest = float(np.abs(numbers).max(initial=0.0))
    if largest >= F16_LIMIT:
        raise CodecError(f"tensor {key} holds {largest:.6g}, but float16 ends at 65504: choose another codec")
    return numbers.astype(np.float16)


def _encode_i8(numbers: Numbers) -> Pieces:
    rows = numbers.reshape(len(numbers), -1) if numbers.size else np.zeros((len(numbers), 0))
    exact = np.abs(rows).max(axis=1, initial=0.0) / _LEVELS
    scales = exact.astype(np.float32)
    scales = np.where(scales < exact, np.nextafter(scales, np.float32(np.inf)), scales)
    steps = np.where(scales > 0, scales, 1.0).astype(np.float64)
    codes = np.clip(np.rint(rows / steps[:, None]), -_LEVELS, _LEVELS)
    return {"": codes.astype(np.int8).reshape(numbers.shape), SCALE_SUFFIX: scales}


def _decode_i8(key: str, pieces: Pieces) -> Numbers:
    codes, scales = pieces[""], pieces[SCALE_SUFFIX]
    bad = ~(np.isfinite(scales) & (scales >= 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise IntegrityError(f"tensor {key}: the scale of channel {at} is {scales[at]}, not finite and at least 0")
    return codes * scales.astype(np.float64).reshape(-1, *(1,) * (codes.ndim - 1))


Array = npt.NDArray[np.float32] | npt.NDArray[np.int64] | npt.NDArray[np.uint32]
PartArrays = Mapping[Part, Mapping[str, Array]]
Codecs = Mapping[str, TensorCodec]
"""The codec of every tensor by key."""


class RawTensor(TypedDict):
    """One received tensor of a payload: safetensors' name of the element type, shape, bytes."""

    dtype: str
    shape: list[int]
    data: bytes


_DTYPES: Mapping[TensorDtype, str] = {"float32": "F32", "int64": "I64", "uint32": "U32"}
_LENGTH_BYTES = 8
# The fields of one tensor in the JSON header of a safetensors file besides its name: dtype, up to 8 dimensions, two offsets.
_ENTRY_BYTES = 200
_HEADER_SLACK_BYTES = 64
_CODEC_SLACK = 0.01


def tensor_key(part: Part, name: str) -> str:
    """The name of a tensor in a payload: "part/name"."""
    return f"{part.value}/{name}"


def flatten(parts: PartArrays) -> dict[str, Array]:
    """All tensors by key, sorted."""
    keyed = {tensor_key(part, name): array for part, arrays in parts.items() for name, array in arrays.items()}
    return dict(sorted(keyed.items()))


def layouts_of(parts: PartArrays) -> dict[Part, tuple[TensorLayout, ...]]:
    """The layouts of given tensors, names sorted.

    Raises:
        MalformedError: an element type that the wire does not carry.
    """
    return {
        part: tuple(
            TensorLayout(name=name, dtype=_dtype_name(tensor_key(part, name), arrays[name]), shape=arrays[name].shape)
            for name in sorted(arrays)
        )
        for part, arrays in sorted(parts.items())
    }


def data_bytes(layouts: PartLayouts, codecs: Codecs) -> int:
    """Bytes of all elements that a payload of the layouts holds, scales included."""
    return sum(stored.data_bytes for stored in _stored(layouts, codecs).values())


def max_payload_bytes(layouts: PartLayouts, codecs: Codecs) -> int:
    """The largest possible size of a payload of these layouts, JSON header included."""
    return _max_bytes(_stored(layouts, codecs))


def encode_tensors(parts: PartArrays, codecs: Codecs, base: PartArrays | None = None) -> bytes:
    """Tensors as a safetensors payload; the same tensors, codecs and base always give the same bytes.

    Args:
        parts: per part, float32, int64 or uint32 arrays by name, any memory order.
        codecs: of every tensor.
        base: the tensors that deltas refer to.

    Raises:
        MalformedError: another element type, or a codec that is missing or can't hold the tensor.
        IntegrityError: a delta to a tensor that the base does not hold.
        CodecError: a number that a codec can't hold.
    """
    stored: dict[str, npt.NDArray[Any]] = {}
    for key, array in flatten(parts).items():
        layout = TensorLayout.model_construct(name=key, dtype=_dtype_name(key, array), shape=array.shape)
        codec = codecs.get(key)
        if codec is None or not fits(layout, codec):
            raise MalformedError(f"tensor {key} of element type {layout.dtype} has codec {codec}, which can't hold it")
        pieces = encode_tensor(key, array, codec, _base_of(key, layout, codec, base))
        stored |= {key + suffix: np.asarray(piece, order="C") for suffix, piece in pieces.items()}
    return save(stored)


def decode_tensors(
    data: bytes, layouts: PartLayouts, codecs: Codecs, base: PartArrays | None = None
) -> dict[Part, dict[str, Array]]:
    """The tensors of a payload, which must be exactly those of the layouts.

    Sizes are computed from layouts and codecs and checked before anything is parsed.

    Args:
        data: the payload.
        layouts: of exactly the tensors that must be inside.
        codecs: of every tensor.
        base: the tensors that deltas refer to.

    Returns:
        Per part of the layouts, writable arrays by name in separate memory.

    Raises:
        TooLargeError: more bytes than the layouts allow.
        MalformedError: not a safetensors payload.
        IntegrityError: a tensor is missing, unknown, or has another element type or shape; its codec can't hold it; a scale that no
            encoder writes; a delta to a tensor that the base does not hold.
    """
    stored = _stored(layouts, codecs)
    _check(data, stored)
    found = read_payload(data)
    decoded: dict[Part, dict[str, Array]] = {part: {} for part in layouts}
    for part, layout in _all(layouts):
        key = tensor_key(part, layout.name)
        pieces = {
            suffix: np.frombuffer(found[key + suffix]["data"], dtype=ELEMENT_TYPES[piece.dtype]).reshape(piece.shape)
            for suffix, piece in stored_tensors(layout.shape, codecs[key]).items()
        }
        decoded[part][layout.name] = decode_tensor(key, pieces, codecs[key], _base_of(key, layout, codecs[key], base))
    return decoded


def read_payload(data: bytes) -> dict[str, RawTensor]:
    """All tensors of a safetensors payload, by key, uninterpreted.

    Raises:
        MalformedError: not a safetensors payload.
    """
    try:
        entries: list[tuple[str, RawTensor]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise MalformedError(f"not a safetensors payload: {error}") from error
    return dict(entries)


def assert_finite(parts: PartArrays) -> None:
    """Check that every floating-point element is a number.

    Raises:
        IntegrityError: names the first tensor with NaN or infinity.
    """
    for key, array in flatten(parts).items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise IntegrityError(f"tensor {key} holds NaN or infinity")


def assert_within(parts: PartArrays, layouts: PartLayouts) -> None:
    """Check the bounds in layouts, with a tolerance of a hundredth for codecs that round.

    Raises:
        IntegrityError: names the first tensor with a number outside its bounds.
    """
    for part, layout in _all(layouts):
        if problem := beyond(parts[part][layout.name], layout, _CODEC_SLACK):
            raise IntegrityError(f"tensor {tensor_key(part, layout.name)}: {problem}")


def beyond(array: Array, layout: TensorLayout, slack: float = 0.0) -> str:
    """The problem if a number is outside the layout's bounds by more than `slack` times the bound (at least `slack`), or ""."""
    if layout.low is not None and array.size and array.min() < layout.low - slack * max(1.0, abs(layout.low)):
        return f"it holds {array.min():g}, below {layout.low:g}"
    if layout.high is not None and array.size and array.max() > layout.high + slack * max(1.0, abs(layout.high)):
        return f"it holds {array.max():g}, above {layout.high:g}"
    return ""


def _dtype_name(key: str, array: Array) -> TensorDtype:
    for name, stored in _DTYPES.items():
        if array.dtype == ELEMENT_TYPES[stored]:
            return name
    raise MalformedError(f"tensor {key} has element type {array.dtype}; only float32, int64 and uint32 cross the wire")


def _all(layouts: PartLayouts) -> Iterator[tuple[Part, TensorLayout]]:
    return ((part, layout) for part, tensors in layouts.items() for layout in tensors)


def _stored(layouts: PartLayouts, codecs: Codecs) -> dict[str, Stored]:
    """The pieces of a payload, by full key.

    Raises:
        IntegrityError: codecs for other tensors, or a codec that can't hold its tensor.
    """
    tensors = {tensor_key(part, layout.name): layout for part, layout in _all(layouts)}
    if codecs.keys() != tensors.keys():
        unknown, missing = sorted(codecs.keys() - tensors.keys()), sorted(tensors.keys() - codecs.keys())
        raise IntegrityError(f"codecs of tensors that no layout names: {unknown[:5]}; missing ones: {missing[:5]}")
    stored: dict[str, Stored] = {}
    for key, layout in tensors.items():
        if not fits(layout, codecs[key]):
            raise IntegrityError(f"codec {codecs[key]} can't hold tensor {key}, {layout.dtype} {list(layout.shape)}")
        stored |= {key + suffix: piece for suffix, piece in stored_tensors(layout.shape, codecs[key]).items()}
    return stored


def _base_of(key: str, layout: TensorLayout, codec: TensorCodec, base: PartArrays | None) -> Array | None:
    """The tensor that a delta refers to; None for codecs by value.

    Raises:
        IntegrityError: the base has no such tensor.
    """
    if not is_delta(codec):
        return None
    part, _, name = key.partition("/")
    found = {} if base is None else base.get(Part(part), {})
    if name not in found or found[name].shape != layout.shape or found[name].dtype != np.float32:
        raise IntegrityError(f"tensor {key} is coded as the difference to a base that has no such tensor")
    return found[name]


def _max_bytes(stored: Mapping[str, Stored]) -> int:
    header = sum(len(key) + _ENTRY_BYTES for key in stored) + _HEADER_SLACK_BYTES
    return _LENGTH_BYTES + header + sum(piece.data_bytes for piece in stored.values())


def _check(data: bytes, stored: Mapping[str, Stored]) -> None:
    """Check sizes before anything is parsed, then names, element types and shapes."""
    if len(data) > (largest := _max_bytes(stored)):
        raise TooLargeError(f"a tensor payload of {len(data)} bytes; the layouts allow {largest}")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    found, expected = len(data) - _LENGTH_BYTES - length, sum(piece.data_bytes for piece in stored.values())
    if found != expected:
        raise IntegrityError(f"a tensor payload holds {found} bytes of elements; the layouts require {expected}")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's parser
        raise MalformedError("the header of a tensor payload is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise MalformedError("the header of a tensor payload is not a table of tensors")
    if header.keys() != stored.keys():
        unknown, missing = sorted(header.keys() - stored.keys()), sorted(stored.keys() - header.keys())
        raise IntegrityError(f"tensors that the layouts do not name: {unknown[:5]}; missing ones: {missing[:5]}")
    for key, piece in stored.items():
        dtype, shape = header[key].get("dtype"), header[key].get("shape")
        if dtype != piece.dtype or shape != list(piece.shape):
            raise IntegrityError(f"tensor {key} is {dtype} {shape}; its layout has {piece.dtype} {list(piece.shape)}")
