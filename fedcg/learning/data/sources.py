"""A device's data source: image files in folders, or array files. Lists files and decodes single images.

Torch-free.

Training, the doctor and snapshots share one directory walk. Images are decoded by `fedcg.imaging`, channels first.
Errors name the file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcg import imaging
from fedcg.errors import NOT_FOUND
from fedcg.imaging import ImageError, Pixels, is_named_as_image
from fedcg.input_form import ImageForm, InputForm, TensorForm
from fedcg.learning.data.array_files import ArrayData, read_npz
from fedcg.learning.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
SPLITS = ("train", "val", "test")


def find_images(
    root: Path, classes: Sequence[str] = (), unreadable: Callable[[str], object] | None = None
) -> tuple[list[Path], list[Path]]:
    """Files with an image suffix in `root/class/` or `root/{train,val,test}/class/`, and images outside any class folder; both sorted.

    Args:
        root: the data folder.
        classes: class names, which may equal a split's name.
        unreadable: called with each unreadable folder and the reason.

    Raises:
        DataError: a folder can't be read, and `unreadable` is None.
    """

    def listed(folder: Path) -> list[Path]:
        try:
            return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        except OSError as error:
            if unreadable is None:
                raise DataError(f"{folder}: {error.strerror or error}") from error
            unreadable(f"{folder}: {error.strerror or error}")
            return []

    splits = [root / name for name in SPLITS if (root / name).is_dir() and name not in classes]
    folders = [path for base in splits or [root] for path in listed(base) if path.is_dir()]
    sorted_in, loose = (
        [path for folder in some for path in listed(folder) if is_named_as_image(path, IMAGE_SUFFIXES)]
        for some in (folders, [*splits, root])
    )
    return sorted_in, loose


def list_files(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Relative path and label of every image under `root/class/*` or `root/{train,val,test}/class/*`, sorted by path.

    Raises:
        DataError: no folder, an unreadable one, images of a class that is not in the spec, or no images.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder", exit_code=NOT_FOUND)
    labels = {name: index for index, name in enumerate(classes)}
    found, loose = find_images(root, classes)
    if unknown := next((path.parent for path in found if path.parent.name not in labels), None):
        raise DataError(
            f"{unknown}: the spec has no class {unknown.name!r}; its classes are {', '.join(classes)}. Rename the folder to "
            "one of them, have the operator list the class in a new federation, or move the folder elsewhere"
        )
    if not found:
        where = "its images are in the folder itself, without class folders" if loose else "no images"
        raise DataError(f"{root}: {where}; expected {root}/CLASS/*.png or .jpg, with CLASS one of {', '.join(classes)}")
    return sorted((path.relative_to(root).as_posix(), labels[path.parent.name]) for path in found)


def decode_image(content: bytes, form: ImageForm, name: str) -> Pixels:
    """Decode the bytes of an image file to [C, H, W] uint8 in the spec's form.

    Raises:
        DataError: not an image, damaged, or over 50 million pixels; names the file.
    """
    try:
        return _channels_first(imaging.decode_image(content, form))
    except ImageError as error:
        raise DataError(f"{name}: {error}") from error


def read_image(path: Path) -> bytes:
    """The bytes of an image file.

    Raises:
        DataError: `fedcg.imaging.read_file` refuses the file; names it.
        OSError: it can't be read.
    """
    try:
        return imaging.read_file(path)
    except ImageError as error:
        raise DataError(f"{path}: {error}") from error


def fit_row(row: NDArray[Any], form: InputForm) -> NDArray[Any]:
    """[H, W] or [H, W, 3] uint8 to [C, H, W] in the spec's form, as from a lossless file; a tensor unchanged."""
    return row if isinstance(form, TensorForm) else fit_pixels(row, form)


def fit_pixels(pixels: Pixels, form: ImageForm) -> Pixels:
    """`fit_row` for an image."""
    return _channels_first(imaging.fit_pixels(pixels, form))


def empty_rows(count: int, form: InputForm) -> NDArray[Any]:
    """An uninitialised array [N, *tensor_shape] of the form's element type."""
    return np.empty((count, *form.tensor_shape), dtype=form.dtype)


def _channels_first(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def is_array_source(root: Path) -> bool:
    """Whether a source is an `.npz`, by name only; otherwise its images are separate files."""
    return root.suffix == ".npz"


def read_arrays(root: Path, form: InputForm | None = None) -> ArrayData:
    """Read an `.npz`, as `read_npz` does.

    Raises:
        DataError: file missing, damaged or over the limits; names it.
    """
    if not root.is_file():
        raise DataError(f"{root}: no such file", exit_code=NOT_FOUND)
    return read_npz(root, form)


def stamp(root: Path) -> tuple[str, int, int]:
    """Name, size and time of an `.npz`. While these are unchanged, the data counts as unchanged."""
    about = root.stat() if root.is_file() else None
    return (root.name, about.st_size, about.st_mtime_ns) if about else (root.name, 0, 0)
