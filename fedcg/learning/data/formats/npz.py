"""`.npz` files: `images` and `labels`; or `train_images`, `train_labels` and the same with `test_` and `val_`; or Keras' `x_train`.

The sizes that the archive and each array's header declare are checked against each other and against the limit before a byte
is unpacked, and never is more unpacked than declared. Objects (pickles) are refused.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedcg.learning.data.formats.arrays import MAX_BYTES, MAX_IMAGES, ArrayData, LabelledImages, checked_shape, labelled
from fedcg.learning.errors import DataError

_WHOLE = ("images", "labels")
_PARTS = {part: ((f"{part}_images", f"{part}_labels"), (f"x_{part}", f"y_{part}")) for part in ("train", "test", "val")}


def read_npz(path: Path) -> ArrayData:
    """Read the labelled images of an `.npz`.

    Raises:
        DataError: not such a file, other arrays in it, damaged, or over the limit; names it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
            if there.issuperset(_WHOLE):
                return ArrayData(_labelled(archive, path, *_WHOLE))
            parts = {
                part: _labelled(archive, path, *names)
                for part, candidates in _PARTS.items()
                for names in candidates
                if there.issuperset(names)
            }
    # What a damaged archive's directory, names and streams raise.
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
            struct.error) as error:  # fmt: skip
        raise DataError(f"{path}: not an .npz, or damaged ({error})") from error
    if "train" not in parts:
        raise DataError(
            f"{path}: not an .npz with the arrays `images` and `labels`, nor with `train_images` and `train_labels` "
            f"(and `test_…`), nor `x_train` and `y_train`; it holds {', '.join(sorted(there)[:8]) or 'nothing'}"
        )
    return ArrayData(parts["train"], parts.get("test"), parts.get("val"))


def read_unlabelled(path: Path) -> NDArray[np.uint8]:
    """The images of an `.npz`, whose labels are not read: `images`, `train_images` or `x_train`.

    Raises:
        DataError: not such a file, no such array, damaged, or over the limit; names it.
    """
    names = (_WHOLE[0], *(images for images, _ in _PARTS["train"]))
    try:
        with zipfile.ZipFile(path) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
            name = next((name for name in names if name in there), None)
            if name is None:
                raise DataError(f"{path}: an .npz without `{'`, `'.join(names)}`")
            pixels = _pixels(archive, path, name)
            if pixels.ndim < 3:
                raise DataError(f"{path}: `{name}` must be [N, H, W] or [N, H, W, 1 or 3], not {list(pixels.shape)}")
            return pixels[..., 0] if pixels.ndim == 4 and pixels.shape[3] == 1 else pixels
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError) as error:
        raise DataError(f"{path}: not an .npz, or damaged ({error})") from error


def _pixels(archive: zipfile.ZipFile, path: Path, name: str) -> NDArray[np.uint8]:
    pixels = _array(archive, path, name)
    if pixels.dtype != np.uint8:
        raise DataError(f"{path}: `{name}` must be uint8, not {pixels.dtype}")
    return pixels.astype(np.uint8, copy=False)


def _labelled(archive: zipfile.ZipFile, path: Path, images: str, labels: str) -> LabelledImages:
    pixels, numbers = _pixels(archive, path, images), _array(archive, path, labels)
    if numbers.dtype.kind not in "iu":
        raise DataError(f"{path}: `{labels}` must be integers, not {numbers.dtype}")
    return labelled(pixels, numbers.astype(np.int64), path, path)


def _array(archive: zipfile.ZipFile, path: Path, name: str) -> NDArray[np.generic]:
    entry = archive.getinfo(f"{name}.npy")
    if entry.file_size > MAX_BYTES:
        raise DataError(f"{path}: `{name}` unpacks to {entry.file_size} bytes: over the limit of {MAX_BYTES}")
    with archive.open(entry) as file:
        shape, is_columns_first, kind = _header(file, path, name)
        if kind.hasobject:
            raise DataError(f"{path}: `{name}` holds objects, which are not read")
        is_images = len(shape) > 2
        size = (
            checked_shape(shape, path) * kind.itemsize
            if is_images
            else int(np.prod(shape, dtype=object)) * kind.itemsize
        )
        if not is_images and (not shape or not 0 < size <= MAX_IMAGES * 8):
            raise DataError(f"{path}: `{name}` has the shape {list(shape)}: there must be at least one image and label")
        if size != entry.file_size - file.tell():
            raise DataError(f"{path}: `{name}` declares {list(shape)} of {kind}, which is not what the archive holds")
        content = file.read(size)
    if len(content) != size:
        raise DataError(f"{path}: `{name}` is cut off")
    return np.frombuffer(content, dtype=kind).reshape(shape, order="F" if is_columns_first else "C")


def _header(file: IO[bytes], path: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        version = npy.read_magic(file)
        if version == (1, 0):
            return npy.read_array_header_1_0(file)
        return npy.read_array_header_2_0(file)
    except ValueError as error:
        raise DataError(f"{path}: `{name}` is not a numpy array ({error})") from error
