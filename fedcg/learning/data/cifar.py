"""CIFAR-10 and CIFAR-100 in the binary version that their authors publish.

The Python version consists of pickles, which can run code when they are read: a folder of it is refused with a sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcg.learning.data.array_files import MAX_BYTES, ArrayData, LabelledImages, labelled
from fedcg.learning.errors import DataError

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS


@dataclass(frozen=True)
class _Layout:
    """Which files make a set, and where its label stands in a record.

    `labels` bytes precede the pixels of a record; the last of them is the class (CIFAR-100: coarse, then fine). The class
    names stand in the file `names`.
    """

    train: tuple[str, ...]
    test: str
    labels: int
    names: str


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_LAYOUTS = (
    _Layout(tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", 1, "batches.meta.txt"),
    _Layout(("train.bin",), "test.bin", 2, "fine_label_names.txt"),
)
_PICKLED = (*_BATCHES, "train")
CIFAR_NAMES = frozenset([*_PICKLED, *(name for layout in _LAYOUTS for name in layout.train)])


def read_cifar_folder(root: Path) -> ArrayData | None:
    """The CIFAR batches of a folder (those of the five training batches that are there); None where there are none.

    Raises:
        DataError: a damaged batch, or the Python version; names the file.
    """
    for layout in _LAYOUTS:
        files = [root / name for name in layout.train if (root / name).is_file()]
        if files:
            test = root / layout.test
            return ArrayData(
                _joined(files, layout),
                _joined([test], layout) if test.is_file() else None,
                classes=_names(root / layout.names),
            )
    if pickled := next((root / name for name in _PICKLED if (root / name).is_file()), None):
        raise DataError(
            f"{pickled}: the Python version of CIFAR consists of pickles, which are not read: put the binary version (*.bin) "
            "there. `--data torchvision:CIFAR10:FOLDER` (or CIFAR100), with the folder above this one, reads it in a simulation"
        )
    return None


def _joined(files: Sequence[Path], layout: _Layout) -> LabelledImages:
    batches = [_read(file, layout) for file in files]
    planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, CHANNELS, SIDE, SIDE)
    labels = np.concatenate([labels for _, labels in batches])
    return labelled(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, files[0], files[0])


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"{path}: {size} bytes is over the limit of {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content, record = _content(path), layout.labels + PIXELS
    if not content or len(content) % record:
        raise DataError(f"{path}: cut off: {len(content)} bytes is no whole number of records of {record}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, layout.labels :], records[:, layout.labels - 1].astype(np.int64)


def _names(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    return tuple(line.strip() for line in _content(path).decode("utf-8", "replace").splitlines() if line.strip())
