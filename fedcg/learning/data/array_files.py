"""Data sets stored as arrays in an `.npz`.

Torch-free. Every size is checked before memory is allocated.

The arrays are `images` and `labels`; or `train_images`, `train_labels` and the same with `test_` and `val_`; or Keras'
`x_train`. The same files can hold tensors of other shapes, uint8 or float32; `inputs` is another name for `images`.

The sizes declared by the archive and by each array's header are checked against each other and the limit before unpacking.
Never more is unpacked than declared. Objects (pickles) are refused.
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcg.input_form import ImageForm, InputForm, TensorForm
from fedcg.learning.errors import DataError
from fedcg.npy_arrays import NpyError, SizeOf, read_npy

# The largest public set of this kind, EMNIST by class, has 814,255 images and 640 MB. A larger file is a mistake or an
# attack.
MAX_BYTES = 2 << 30
MAX_IMAGES = 4_000_000
MAX_SIDE = 4096


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One part of a data set.

    Attributes:
        images: [N, H, W] (grey) or [N, H, W, 3] uint8; of tensors [N, ...] uint8 or float32, all numbers finite.
        labels: [N] int64, not negative.
        file: the source file, for messages and names.
        blocks: the sha256 of the block that each row was cut from; a block is never divided by a split. None: rows are
            split individually.
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]
    file: Path
    blocks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A data set read from array files.

    Attributes:
        train: the training part, or everything if the set has one part.
        test: the test part, if there is one.
        val: the validation part, if there is one.
        classes: class names in label order, if the files contain them.
    """

    train: LabelledImages
    test: LabelledImages | None = None
    val: LabelledImages | None = None
    classes: tuple[str, ...] | None = None

    def parts(self) -> dict[str, LabelledImages]:
        """The existing parts by name, in the order train, val, test."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def checked_shape(shape: tuple[int, ...], where: Path) -> int:
    """The bytes of uint8 images of this shape.

    Raises:
        DataError: not [N, H, W] or [N, H, W, 1 or 3], empty, or over the limits.
    """
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise DataError(f"{where}: images must be uint8 [N, H, W] or [N, H, W, 1 or 3], not {list(shape)}")
    if min(shape) < 1:
        raise DataError(f"{where}: contains no image (shape {list(shape)})")
    size = int(np.prod([int(side) for side in shape], dtype=object))
    if shape[0] > MAX_IMAGES or max(shape[1:]) > MAX_SIDE or size > MAX_BYTES:
        raise DataError(
            f"{where}: declares {list(shape)}: over the limit of {MAX_IMAGES} images of {MAX_SIDE}x{MAX_SIDE} "
            f"and {MAX_BYTES >> 20} MiB"
        )
    return size


def holds_images(shape: tuple[int, ...], kind: np.dtype[Any]) -> bool:
    """Whether an array, by shape and type alone, holds images ([N, H, W] or [N, H, W, 1 or 3] uint8) rather than tensors."""
    return kind == np.uint8 and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))


def _checked_tensors(shape: tuple[int, ...], kind: np.dtype[Any], form: TensorForm | None, where: str) -> int:
    """The bytes of tensors, after checking them against a form if one is given."""
    if form is not None and (shape[1:], kind) != (form.shape, np.dtype(form.dtype)):
        raise DataError(
            f"{where} must be {form.dtype} [N, {', '.join(map(str, form.shape))}], not {kind} {list(shape)}"
        )
    if kind not in (np.uint8, np.float32) or len(shape) not in range(2, 6) or min(shape) < 1:
        raise DataError(
            f"{where} must be uint8 or float32, [N, ...] with 1 to 4 dimensions after N, not {kind} {list(shape)}"
        )
    size = int(np.prod(shape, dtype=object)) * kind.itemsize
    if shape[0] > MAX_IMAGES or size > MAX_BYTES:
        raise DataError(f"{where} declares {list(shape)}: the limit is {MAX_IMAGES} rows and {MAX_BYTES >> 20} MiB")
    return size


def labelled(images: NDArray[Any], labels: NDArray[np.int64], file: Path, labels_file: Path) -> LabelledImages:
    """Inputs with their labels.

    Raises:
        DataError: not one label per input, or a negative one.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != images.shape[:1]:
        raise DataError(f"{labels_file}: {list(labels.shape)} labels for the {len(images)} images of {file}")
    if int(labels.min()) < 0:
        raise DataError(f"{labels_file}: a negative label ({int(labels.min())})")
    return LabelledImages(images, labels, file)


_WHOLE = (("images", "labels"), ("inputs", "labels"))
_PARTS = {part: ((f"{part}_images", f"{part}_labels"), (f"x_{part}", f"y_{part}")) for part in ("train", "test", "val")}


def read_npz(path: Path, form: InputForm | None = None) -> ArrayData:
    """Read the labelled images or tensors of an `.npz`.

    Args:
        path: the file.
        form: the expected form; None: images if the arrays look like images (`holds_images`), else tensors.

    Raises:
        DataError: not an `.npz`, wrong arrays, damaged, or over the limit; names the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
            for names in _WHOLE:
                if there.issuperset(names):
                    return ArrayData(_labelled(archive, path, *names, form))
            parts = {
                part: _labelled(archive, path, *names, form)
                for part, candidates in _PARTS.items()
                for names in candidates
                if there.issuperset(names)
            }
    # Errors raised by a damaged archive's directory, names and streams.
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error,
            struct.error) as error:  # fmt: skip
        raise DataError(f"{path}: not an .npz, or damaged ({error})") from error
    if "train" not in parts:
        raise DataError(
            f"{path}: needs the arrays `images` and `labels`, or `train_images` and `train_labels` "
            f"(and `test_…`), or `x_train` and `y_train`; it has {', '.join(sorted(there)[:8]) or 'nothing'}"
        )
    return ArrayData(parts["train"], parts.get("test"), parts.get("val"))


def read_unlabelled(path: Path, form: InputForm) -> NDArray[Any]:
    """The images or tensors of an `.npz`, without reading labels: `images`, `inputs`, `train_images` or `x_train`.

    Raises:
        DataError: not an `.npz`, no such array, damaged, or over the limit; names the file.
    """
    names = [images for images, _ in (*_WHOLE, *_PARTS["train"])]
    try:
        with zipfile.ZipFile(path) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
            name = next((name for name in names if name in there), None)
            if name is None:
                raise DataError(f"{path}: needs one of the arrays `{'`, `'.join(names)}`")
            return _inputs(archive, path, name, form)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError) as error:
        raise DataError(f"{path}: not an .npz, or damaged ({error})") from error


def _inputs(archive: zipfile.ZipFile, path: Path, name: str, form: InputForm | None) -> NDArray[Any]:
    """Images, with a single channel's axis removed, or tensors."""

    def are_images(shape: tuple[int, ...], kind: np.dtype[Any]) -> bool:
        return isinstance(form, ImageForm) or (form is None and holds_images(shape, kind))

    def size_of(shape: tuple[int, ...], kind: np.dtype[Any]) -> int:
        if not are_images(shape, kind):
            return _checked_tensors(shape, kind, form if isinstance(form, TensorForm) else None, f"{path}: `{name}`")
        if kind != np.uint8:
            raise DataError(f"{path}: `{name}` must be uint8, not {kind}")
        return checked_shape(shape, path)

    found = _array(archive, path, name, size_of)
    if are_images(found.shape, found.dtype):
        return found[..., 0] if found.ndim == 4 and found.shape[3] == 1 else found
    finite = np.isfinite(found).reshape(len(found), -1).all(1)
    if not finite.all():
        raise DataError(f"{path}#{int(finite.argmin())}: numbers that are not finite; repair or remove the row")
    return found


def _labelled(archive: zipfile.ZipFile, path: Path, images: str, labels: str, form: InputForm | None) -> LabelledImages:
    def size_of(shape: tuple[int, ...], kind: np.dtype[Any]) -> int:
        size = int(np.prod(shape, dtype=object)) * kind.itemsize
        if not shape or not 0 < size <= MAX_IMAGES * 8:
            raise DataError(
                f"{path}: `{labels}` has the shape {list(shape)}: there must be at least one image and label"
            )
        return size

    inputs, numbers = _inputs(archive, path, images, form), _array(archive, path, labels, size_of)
    if numbers.dtype.kind not in "iu":
        raise DataError(f"{path}: `{labels}` must be integers, not {numbers.dtype}")
    return labelled(inputs, numbers.astype(np.int64), path, path)


def _array(archive: zipfile.ZipFile, path: Path, name: str, size_of: SizeOf) -> NDArray[Any]:
    """Read an array after `size_of` has checked its shape and type."""
    entry = archive.getinfo(f"{name}.npy")
    if entry.file_size > MAX_BYTES:
        raise DataError(f"{path}: `{name}` unpacks to {entry.file_size} bytes: over the limit of {MAX_BYTES}")
    with archive.open(entry) as file:
        try:
            return read_npy(file, entry.file_size, size_of)
        except NpyError as error:
            raise DataError(f"{path}: `{name}` {error}") from error
