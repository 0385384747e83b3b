"""Codecs: from one tensor's numbers to their bytes in a payload, and back. Torch-free; knows no headers, parts or files.

| codec | a float32 tensor's payload |
|---|---|
| `f32` | its numbers |
| `f16` | its numbers as float16 |
| `i8` | one byte a number, and one float32 scale per channel (row of the first axis) under the key with `SCALE_SUFFIX` |
| `f16-delta`, `i8-delta` | the same of the difference to the base, the decoded tensor that sender and receiver both hold |
| `i64` | of an int64 tensor: its numbers |

A codec chosen for a whole artifact is each large float32 tensor's; `tensor_codec` gives the codec of the others. Laws (property-tested), for finite
x, with x' = decode(encode(x)), base b (0 by value), d = x - b, ε = 2^-23:

  * `f32`, `i64`: x' = x, bit for bit;
  * `f16`: |x - x'| <= 2^-11 |d| + 2^-25 + ε |x'|; a |d| of 65520 or more has no float16 and is refused, never sent as infinity;
  * `i8`: |x - x'| <= s/2 + ε (|x'| + s) + 2^-149, where s is the channel's scale, the least float32 of at least max |d| / 127;
  * the same numbers always give the same bytes: everything is computed in float64 and rounded once, halves to even;
  * a payload holds exactly the tensors that `stored_tensors` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcg.wire.errors import CodecError, IntegrityError
from fedcg.wire.parts import TensorCodec, TensorLayout, UpdateCodec, is_delta

SCALE_SUFFIX = ":scale"
"""No tensor can be named so: a layout's names have letters, digits, "_" and "."."""
MIN_CHANNEL = 8
"""A scale and a byte each save little on shorter channels, and biases and statistics are worth their exactness."""
F16_LIMIT = 65520.0
"""The least number that rounds to no float16."""
_LEVELS = 127
_LARGEST = float(np.finfo(np.float32).max)

Numbers = npt.NDArray[np.float64]
Pieces = Mapping[str, npt.NDArray[Any]]
"""The stored pieces of one tensor, by the suffix of its key; the tensor itself under ""."""


@dataclass(frozen=True)
class Stored:
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
}

STORED_AS: Mapping[TensorCodec, str] = {
    "f32": "F32",
    "i64": "I64",
    "f16": "F16",
    "i8": "I8",
    "f16-delta": "F16",
    "i8-delta": "I8",
}
"""The element type of a codec's payload."""
_EXACT = frozenset({"f32", "i64"})
_BY_VALUE: Mapping[UpdateCodec, TensorCodec] = {"f16-delta": "f16", "i8-delta": "i8"}


def tensor_codec(layout: TensorLayout, codec: UpdateCodec, *, has_base: bool) -> TensorCodec:
    """The codec of one tensor where `codec` is the artifact's.

    Integers and 0-d tensors stay exact, and so does a float32 tensor with fewer than `MIN_CHANNEL` numbers per row of its first axis
    (biases, batch norm's weights and statistics): they are few bytes and matter much.

    Args:
        layout: the tensor.
        codec: the artifact's.
        has_base: whether the tensor's part has a base; without one a delta codec goes by value.
    """
    if layout.dtype == "int64":
        return "i64"
    if math.prod(layout.shape[1:]) < MIN_CHANNEL or len(layout.shape) < 2:
        return "f32"
    if is_delta(codec) and not has_base:
        return _BY_VALUE[codec]
    return codec


def fits(layout: TensorLayout, codec: TensorCodec) -> bool:
    """Whether a codec can hold such a tensor at all."""
    if (layout.dtype == "int64") != (codec == "i64"):
        return False
    return not codec.startswith("i8") or len(layout.shape) > 0


def stored_tensors(shape: tuple[int, ...], codec: TensorCodec) -> dict[str, Stored]:
    """The pieces of a tensor of this shape in a payload, by the suffix of its key."""
    stored = {"": Stored(STORED_AS[codec], shape)}
    return stored | {SCALE_SUFFIX: Stored("F32", shape[:1])} if codec.startswith("i8") else stored


def encode_tensor(key: str, array: npt.NDArray[Any], codec: TensorCodec, base: npt.NDArray[Any] | None) -> Pieces:
    """The stored pieces of a tensor.

    Args:
        key: its name, for messages.
        array: float32 or int64, finite where the codec is not exact.
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
    """The tensor in stored pieces, in memory of its own; arguments as those of `encode_tensor`.

    Raises:
        IntegrityError: a scale that no encoder writes.
    """
    if codec in _EXACT:
        return np.array(pieces[""])
    numbers = _decode_i8(key, pieces) if codec.startswith("i8") else pieces[""].astype(np.float64)
    if is_delta(codec):
        assert base is not None
        numbers = numbers + base
    if codec.startswith("i8"):  # scales round up, so that the largest float32 could come back as infinity
        numbers = np.clip(numbers, -_LARGEST, _LARGEST)
    single: npt.NDArray[np.float32] = numbers.astype(np.float32)
    return single


def _to_f16(key: str, numbers: Numbers) -> npt.NDArray[np.float16]:
    largest = float(np.abs(numbers).max(initial=0.0))
    if largest >= F16_LIMIT:
        raise CodecError(f"tensor {key} holds {largest:.6g}, and float16 ends at 65504: choose another codec")
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
        raise IntegrityError(
            f"tensor {key}: the scale of channel {at} is {scales[at]}, not a finite number of at least 0"
        )
    return codes * scales.astype(np.float64).reshape(-1, *(1,) * (codes.ndim - 1))
