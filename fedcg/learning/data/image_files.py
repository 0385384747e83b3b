"""Which files below a data folder are images: one walk for training, the doctor and the snapshots. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedcg.imaging import is_named_as_image
from fedcg.learning.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
SPLITS = ("train", "val", "test")


def images_in(folder: Path) -> list[Path]:
    """What is named as an image in a folder, sorted; hidden files are not.

    Raises:
        DataError: the folder can't be read.
    """
    return _listed(folder, lambda path: is_named_as_image(path, IMAGE_SUFFIXES))


def class_folders(root: Path, classes: Sequence[str] = ()) -> list[Path]:
    """The folders in `root`, or in its `train`, `val` and `test`, that should each hold the images of a class.

    Raises:
        DataError: a folder can't be read.
    """
    bases = split_folders(root, classes) or [root]
    return [path for base in bases for path in _listed(base, Path.is_dir) if not path.name.startswith(".")]


def split_folders(root: Path, classes: Sequence[str] = ()) -> list[Path]:
    """Those of `train`, `val` and `test` that are there and are not classes themselves."""
    return [root / name for name in SPLITS if (root / name).is_dir() and name not in classes]


def loose_images(root: Path, classes: Sequence[str] = ()) -> list[Path]:
    """Images in no class's folder: they are not used.

    Raises:
        DataError: a folder can't be read.
    """
    return [path for folder in (root, *split_folders(root, classes)) for path in images_in(folder)]


def list_files(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Relative path and label of every image under `root/class/*` or `root/{train,val,test}/class/*`, sorted by path.

    Raises:
        DataError: no folder, one that can't be read, a class folder that the spec does not name, or no image at all.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    labels = {name: index for index, name in enumerate(classes)}
    found: list[tuple[str, int]] = []
    for folder in class_folders(root, classes):
        if folder.name not in labels:
            raise DataError(
                f"{folder}: the spec has no class {folder.name!r}; its classes are {', '.join(classes)}. Rename the folder to "
                "one of them, have the operator list the class in a new federation, or move the folder elsewhere"
            )
        found += [(path.relative_to(root).as_posix(), labels[folder.name]) for path in images_in(folder)]
    if not found:
        loose = loose_images(root, classes)
        where = "its images lie in the folder itself, which names no class" if loose else "no images"
        raise DataError(f"{root}: {where}; expected {root}/CLASS/*.png or .jpg with CLASS one of {', '.join(classes)}")
    return sorted(found)


def _listed(folder: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    try:
        return sorted(filter(is_wanted, folder.iterdir()))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}") from error
