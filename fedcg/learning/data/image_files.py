"""Which files below a data folder are images: one walk for training, the doctor and the snapshots. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedcg.imaging import is_named_as_image
from fedcg.learning.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
SPLITS = ("train", "val", "test")


def find_images(
    root: Path, classes: Sequence[str] = (), unreadable: Callable[[str], object] | None = None
) -> tuple[list[Path], list[Path]]:
    """What is named as an image in `root/class/` or `root/{train,val,test}/class/`, and what lies in no class's folder; both sorted.

    Args:
        root: the data folder.
        classes: a class may be named as a split.
        unreadable: gets what can't be read, and why.

    Raises:
        DataError: a folder can't be read, without `unreadable`.
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
        DataError: no folder, one that can't be read, images of a class that the spec does not name, or no image at all.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    labels = {name: index for index, name in enumerate(classes)}
    found, loose = find_images(root, classes)
    if unknown := next((path.parent for path in found if path.parent.name not in labels), None):
        raise DataError(
            f"{unknown}: the spec has no class {unknown.name!r}; its classes are {', '.join(classes)}. Rename the folder to "
            "one of them, have the operator list the class in a new federation, or move the folder elsewhere"
        )
    if not found:
        where = "its images lie in the folder itself, which names no class" if loose else "no images"
        raise DataError(f"{root}: {where}; expected {root}/CLASS/*.png or .jpg with CLASS one of {', '.join(classes)}")
    return sorted((path.relative_to(root).as_posix(), labels[path.parent.name]) for path in found)
