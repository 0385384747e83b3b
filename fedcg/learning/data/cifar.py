"""CIFAR-10 and CIFAR-100 as their authors publish them: binary batches, and the Python version.

The Python batches are pickles. They are read by an unpickler that knows nothing but stand-ins of this module for the three numpy names in those files: it can call nothing else, and numpy gets plain bytes whose size was checked.
"""

import io
import pickle
from collections.abc import Callable, Sequence
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

    `labels` bytes precede the pixels of a binary record; the last of them is the class (CIFAR-100: coarse, then fine). The
    class names stand in the file `names`; in a pickle under `key`.
    """

    train: tuple[str, ...]
    test: str
    labels: int
    names: str
    key: bytes = b""


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_BINARY = (
    _Layout(tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", 1, "batches.meta.txt"),
    _Layout(("train.bin",), "test.bin", 2, "fine_label_names.txt"),
)
_PYTHON = (
    _Layout(_BATCHES, "test_batch", 1, "batches.meta", b"label_names"),
    _Layout(("train",), "test", 2, "meta", b"fine_label_names"),
)
CIFAR_NAMES = frozenset(name for layout in (*_BINARY, *_PYTHON) for name in layout.train)
_LABEL_KEYS = {1: b"labels", 2: b"fine_labels"}


def read_cifar_folder(root: Path) -> ArrayData | None:
    """The CIFAR batches of a folder (those of the five training batches that are there); None where there are none.

    Raises:
        DataError: a damaged batch; names it.
    """
    for layouts, read, names in ((_BINARY, _read_binary, _text_names), (_PYTHON, _read_python, _pickled_names)):
        for layout in layouts:
            files = [root / name for name in layout.train if (root / name).is_file()]
            if files:
                test = root / layout.test
                return ArrayData(
                    _joined(files, layout, read),
                    _joined([test], layout, read) if test.is_file() else None,
                    classes=names(root / layout.names, layout),
                )
    return None


def _joined(
    files: Sequence[Path], layout: _Layout, read: Callable[[Path, _Layout], tuple[NDArray[np.uint8], NDArray[np.int64]]]
) -> LabelledImages:
    batches = [read(file, layout) for file in files]
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


def _read_binary(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content, record = _content(path), layout.labels + PIXELS
    if not content or len(content) % record:
        raise DataError(f"{path}: cut off: {len(content)} bytes is no whole number of records of {record}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, layout.labels :], records[:, layout.labels - 1].astype(np.int64)


def _text_names(path: Path, _: _Layout) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    return tuple(line.strip() for line in _content(path).decode("utf-8", "replace").splitlines() if line.strip())


def _read_python(path: Path, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batch = _unpickled(path)
    data, labels = batch.get(b"data"), batch.get(_LABEL_KEYS[layout.labels])
    if not isinstance(data, _Array) or not isinstance(labels, list) or not all(type(one) is int for one in labels):
        raise DataError(f"{path}: not a CIFAR batch: it needs pixels under `data` and a list of labels")
    if not labels or len(data.content) != len(labels) * PIXELS:
        raise DataError(f"{path}: {len(data.content)} bytes of pixels for {len(labels)} labels of {PIXELS} each")
    if not all(0 <= one < 256 for one in labels):
        raise DataError(f"{path}: a label outside 0..255")
    return np.frombuffer(data.content, dtype=np.uint8).reshape(-1, PIXELS), np.array(labels, dtype=np.int64)


def _pickled_names(path: Path, layout: _Layout) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    names = _unpickled(path).get(layout.key)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise DataError(f"{path}: no list of class names under `{layout.key.decode()}`")
    return tuple(name.decode("utf-8", "replace") for name in names)


class _Array:
    """Stands in for a numpy array in a pickle: keeps the bytes of its state, whatever else the file holds."""

    content = b""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Keep the last field of numpy's state: (version, shape, type, is Fortran order, bytes)."""
        content = state[-1] if isinstance(state, tuple) and state else None
        is_rows_first = isinstance(state, tuple) and len(state) == 5 and state[3] in (False, 0)
        if not isinstance(content, bytes) or not is_rows_first:
            raise pickle.UnpicklingError("an array that is not plain bytes, row by row")
        self.content = content


class _Type:
    """Stands in for numpy's `dtype`; its content is not needed, since the number of bytes is checked."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Ignore it."""


def _encoded(text: str, _: str = "latin1") -> bytes:
    """What newer Pythons write for bytes: `_codecs.encode(text, "latin1")`."""
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    _KNOWN = {  # noqa: RUF012 - a constant table, read only
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
        ("_codecs", "encode"): _encoded,
    }

    def find_class(self, module_name: str, global_name: str) -> object:
        """A stand-in, or a refusal."""
        try:
            return self._KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"names {module_name}.{global_name}, which no CIFAR batch does") from None


def _unpickled(path: Path) -> dict[bytes, object]:
    try:
        batch = _Unpickler(io.BytesIO(_content(path)), encoding="bytes").load()
    # A damaged pickle can fail in any of these ways.
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
            OverflowError, MemoryError, UnicodeError) as error:  # fmt: skip
        raise DataError(
            f"{path}: not a CIFAR batch ({error}); the binary version of the data set (*.bin) has no pickles"
        ) from error
    if not isinstance(batch, dict):
        raise DataError(f"{path}: not a CIFAR batch: it holds no dictionary")
    return {key: value for key, value in batch.items() if isinstance(key, bytes)}
