"""IDX files, the form of MNIST and its family (Fashion-MNIST, KMNIST, EMNIST, QMNIST): a magic number, big-endian sizes, bytes.

A folder holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same with `t10k-` (or `test-`), each also as `.gz`,
with a name in front where the set has one (`emnist-digits-train-images-idx3-ubyte`).
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedcg.learning.data.formats.arrays import MAX_BYTES, MAX_IMAGES, ArrayData, LabelledImages, checked_shape, labelled
from fedcg.learning.errors import DataError

_NAME = re.compile(r"(?P<set>.*?)-?(?P<part>train|t10k|test)-(?P<what>images|labels)[.-]idx[13]-ubyte(\.gz)?")
_UNSIGNED_BYTE = 8  # the code of the element type, third byte of the magic number


def is_idx_name(name: str) -> bool:
    """Whether a file of this name is one of a set's IDX files."""
    return _NAME.fullmatch(name) is not None


def read_idx_folder(root: Path) -> ArrayData | None:
    """The IDX files of a folder; None where there are none.

    Raises:
        DataError: files of several sets, a missing one of a pair, or a damaged one; names it.
    """
    found = {
        (match["set"], match["part"], match["what"]): path
        for path in sorted(root.iterdir(), reverse=True)  # the unpacked file wins over its .gz
        if (match := _NAME.fullmatch(path.name)) is not None and path.is_file()
    }
    sets = sorted({key[0] for key in found})
    if not found:
        return None
    if len(sets) > 1:
        raise DataError(f"{root}: holds the files of several sets ({', '.join(sets)}): give each a folder of its own")
    parts = {part: _read_part(root, found, sets[0], part) for _, part, what in found if what == "images"}
    if "train" not in parts:
        raise DataError(f"{root}: no train-images-idx3-ubyte beside {next(iter(found.values())).name}")
    return ArrayData(parts["train"], parts.get("t10k", parts.get("test")))


def _read_part(root: Path, found: dict[tuple[str, str, str], Path], name: str, part: str) -> LabelledImages:
    images_file, labels_file = found[name, part, "images"], found.get((name, part, "labels"))
    if labels_file is None:
        raise DataError(f"{root}: {images_file.name} has no {part}-labels-idx1-ubyte beside it")
    images = read_idx(images_file, 3)
    labels = read_idx(labels_file, 1).astype(np.int64)
    if name.startswith("emnist"):
        images = np.ascontiguousarray(images.transpose(0, 2, 1))  # EMNIST's files store the columns first
    if name == "emnist-letters":
        labels = labels - 1  # its labels are 1..26
    return labelled(images, labels, images_file, labels_file)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """One IDX file of unsigned bytes.

    Args:
        path: the file; `.gz` is unpacked while reading.
        dimensions: 3 for images, 1 for labels.

    Raises:
        DataError: another form, more declared than the limit allows, or fewer or more bytes than declared.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(cast(BinaryIO, file), path, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or unreadable ({error})") from error


def _read(file: BinaryIO, path: Path, dimensions: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * dimensions)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if len(header) < 4 + 4 * dimensions or header[:4] != expected:
        raise DataError(f"{path}: not an IDX file of {dimensions}-dimensional unsigned bytes")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    size = checked_shape(shape, path) if dimensions == 3 else shape[0]
    if shape[0] > MAX_IMAGES or size > MAX_BYTES:
        raise DataError(f"{path}: declares {shape[0]} labels: over the limit of {MAX_IMAGES}")
    content = file.read(size + 1)
    if len(content) != size:
        fault = "cut off" if len(content) < size else "longer than declared"
        raise DataError(
            f"{path}: {fault}: it declares {list(shape)}, which takes {size} bytes, and {len(content)} are there"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
