"""Tensors as bytes: numpy arrays of named parts to safetensors and back, bounded by the layouts both sides agreed on.

Knows nothing of headers or compression (`artifacts`); no pickle, no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError
from fedcg.wire.parts import Part, PartLayouts, TensorDtype, TensorLayout

Array = npt.NDArray[np.float32] | npt.NDArray[np.int64]
PartArrays = Mapping[Part, Mapping[str, Array]]


class RawTensor(TypedDict):
    """One tensor of a payload as it came: safetensors' name of the element type, shape, bytes."""

    dtype: str
    shape: list[int]
    data: bytes


_DTYPES: dict[TensorDtype, tuple[str, np.dtype[np.float32] | np.dtype[np.int64]]] = {
    "float32": ("F32", np.dtype("<f4")),
    "int64": ("I64", np.dtype("<i8")),
}
_LENGTH_BYTES = 8
# What the JSON header of a safetensors file says about one tensor besides its name: dtype, up to 8 dimensions, two offsets.
_ENTRY_BYTES = 200
_HEADER_SLACK_BYTES = 64


def tensor_key(part: Part, name: str) -> str:
    """The name of a tensor in a payload: "part/name"."""
    return f"{part.value}/{name}"


def flatten(parts: PartArrays) -> dict[str, Array]:
    """All tensors by key, sorted."""
    keyed = {tensor_key(part, name): array for part, arrays in parts.items() for name, array in arrays.items()}
    return dict(sorted(keyed.items()))


def layouts_of(parts: PartArrays) -> dict[Part, tuple[TensorLayout, ...]]:
    """The layouts of tensors at hand, names sorted.

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


def data_bytes(layouts: PartLayouts) -> int:
    """Bytes of all tensor elements of the layouts."""
    return sum(
        _DTYPES[layout.dtype][1].itemsize * math.prod(layout.shape) for part in layouts.values() for layout in part
    )


def payload_bounds(layouts: PartLayouts) -> tuple[int, int]:
    """Smallest and largest size in bytes that a payload of these layouts can have, its JSON header included."""
    names = [tensor_key(part, layout.name) for part, tensors in layouts.items() for layout in tensors]
    header = sum(len(name) + _ENTRY_BYTES for name in names) + _HEADER_SLACK_BYTES
    data = data_bytes(layouts)
    return _LENGTH_BYTES + 2 + data, _LENGTH_BYTES + header + data


def encode_tensors(parts: PartArrays) -> bytes:
    """Tensors as a safetensors payload; the same tensors always give the same bytes.

    Args:
        parts: per part, float32 or int64 arrays by name, any memory order.

    Raises:
        MalformedError: another element type.
    """
    flat = flatten(parts)
    for key, array in flat.items():
        _dtype_name(key, array)
    return save({key: np.asarray(array, order="C") for key, array in flat.items()})


def decode_tensors(data: bytes, layouts: PartLayouts) -> dict[Part, dict[str, Array]]:
    """The tensors of a payload, which must be exactly those of the layouts.

    Sizes are computed from the layouts and compared before anything is parsed.

    Returns:
        Per part of the layouts, writable arrays by name in memory of their own.

    Raises:
        TooLargeError: more bytes than the layouts allow.
        MalformedError: not a safetensors payload.
        IntegrityError: a tensor is missing, unknown, or has another element type or shape.
    """
    _check_size(data, layouts)
    _check_header(data, layouts)
    found = read_payload(data)
    return {
        part: {layout.name: _array(found[tensor_key(part, layout.name)]["data"], layout) for layout in tensors}
        for part, tensors in layouts.items()
    }


def read_payload(data: bytes) -> dict[str, RawTensor]:
    """Whatever tensors a safetensors payload holds, by key, uninterpreted.

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


def _dtype_name(key: str, array: Array) -> TensorDtype:
    for name, (_, dtype) in _DTYPES.items():
        if array.dtype == dtype:
            return name
    raise MalformedError(f"tensor {key} has element type {array.dtype}; only float32 and int64 cross the wire")


def _array(data: bytes, layout: TensorLayout) -> Array:
    flat: npt.NDArray[Any] = np.frombuffer(data, dtype=_DTYPES[layout.dtype][1])
    array: Array = flat.reshape(layout.shape).copy()
    return array


def _check_size(data: bytes, layouts: PartLayouts) -> None:
    smallest, largest = payload_bounds(layouts)
    if len(data) > largest:
        raise TooLargeError(f"a tensor payload of {len(data)} bytes; the layouts allow {largest}")
    if len(data) < smallest:
        raise MalformedError(f"a tensor payload of {len(data)} bytes is cut short; the layouts need {smallest}")
    header = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if _LENGTH_BYTES + header + data_bytes(layouts) != len(data):
        raise IntegrityError(
            f"a tensor payload holds {len(data) - _LENGTH_BYTES - header} bytes of elements; the layouts say {data_bytes(layouts)}"
        )


def _check_header(data: bytes, layouts: PartLayouts) -> None:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's parser
        raise MalformedError("the header of a tensor payload is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise MalformedError("the header of a tensor payload is not a table of tensors")
    expected = {tensor_key(part, layout.name): layout for part, tensors in layouts.items() for layout in tensors}
    if header.keys() != expected.keys():
        unknown, missing = sorted(header.keys() - expected.keys()), sorted(expected.keys() - header.keys())
        raise IntegrityError(f"tensors that the layouts do not name: {unknown[:5]}; missing ones: {missing[:5]}")
    for key, layout in expected.items():
        dtype, shape = header[key].get("dtype"), header[key].get("shape")
        if dtype != _DTYPES[layout.dtype][0] or shape != list(layout.shape):
            raise IntegrityError(
                f"tensor {key} is {dtype} {shape}; its layout says {_DTYPES[layout.dtype][0]} {list(layout.shape)}"
            )
