"""Reads one array in numpy's npy format, versions 1 and 2, with a strict header and a size check before allocation. Needs only numpy."""

import re
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

SizeOf = Callable[[tuple[int, ...], np.dtype[Any]], int]
"""Returns the number of bytes of an array of this shape and element type; raises an error to refuse it."""
_LENGTH_BYTES = {b"\x93NUMPY\1\0": 2, b"\x93NUMPY\2\0": 4}
_MAX_HEADER = 10_000  # numpy's own bound
_HEADER = re.compile(
    rb"\{ *'descr' *: *'([<>|=]?[biufcSUVOmM]\d{0,4})' *, *'fortran_order' *: *(True|False) *, "
    rb"*'shape' *: *\(((?: *\d{1,18}L? *,){0,32}(?: *\d{1,18}L?)?) *\) *,? *\}\s*"  # Python 2 wrote 3L
)


class NpyError(ValueError):
    """Bytes that are not such an array. The message gives the reason and names no file."""


def read_npy(file: IO[bytes], length: int, size_of: SizeOf) -> NDArray[Any]:
    """The array of an npy file.

    Args:
        file: at its first byte.
        length: its number of bytes.
        size_of: checks shape and element type before the numbers are read.

    Raises:
        NpyError: another format, objects, or a number of bytes that differs from the header.
    """
    length_bytes = _LENGTH_BYTES.get(file.read(8))
    if length_bytes is None:
        raise NpyError("is not a numpy array (of version 1 or 2)")
    header_size = int.from_bytes(file.read(length_bytes), "little")
    header = _HEADER.fullmatch(file.read(header_size)) if header_size <= _MAX_HEADER else None
    if header is None:
        raise NpyError("is not a numpy array (its header names no type, order and shape)")
    try:
        kind = np.dtype(header[1].decode())
    except TypeError as error:
        raise NpyError(f"is not a numpy array ({error})") from error
    shape = tuple(int(side.strip(b" L")) for side in header[3].split(b",") if side.strip())
    if kind.hasobject:
        raise NpyError("holds objects, which are not read")
    size, there = size_of(shape, kind), length - 8 - length_bytes - header_size
    if size != there:
        raise NpyError(f"declares {list(shape)} of {kind}, {size} bytes, and has {there}")
    content = file.read(size)
    if len(content) != size:
        raise NpyError("is cut off")
    return np.frombuffer(content, dtype=kind).reshape(shape, order="F" if header[2] == b"True" else "C")
