"""Labelled images from a folder, `CLASS/*.png` and so on, in the form a model takes; numpy and Pillow only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.errors import InputError
from export.model.classify import expand
from export.model.preprocess import load_image
from fedcg.errors import NOT_FOUND
from fedcg.image_form import ImageForm
from fedcg.imaging import Pixels


def labelled_files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    """Image files under `folder/CLASS/` and the index of their class, in order of class and path.

    Args:
        folder: one folder per class; a class may be missing. Where there is `folder/test/CLASS/`, only that counts.
        classes: the model's class names.

    Raises:
        InputError: no such folder, a folder that is no class, or no image.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", exit_code=NOT_FOUND)
    root = folder / "test" if (folder / "test").is_dir() and "test" not in classes else folder
    unknown = sorted(one for one in root.iterdir() if one.is_dir() and one.name not in classes)
    if unknown:
        raise InputError(str(unknown[0]), f"the model has no such class; its classes are {', '.join(classes[:20])}")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        if (root / name).is_dir()
        for path in expand([str(root / name)])
        if path.is_file()
    ]
    if not found:
        raise InputError(str(folder), f"no images; expected {folder}/CLASS/*.png or .jpg")
    return [path for path, _ in found], [label for _, label in found]


def labelled_images(
    folder: Path, classes: Sequence[str], form: ImageForm, limit: int | None = None
) -> tuple[list[Pixels], list[int]]:
    """The images that `labelled_files` finds, decoded, and the index of their class.

    Args:
        folder: one folder per class.
        classes: the model's class names.
        form: mode and size that the model takes.
        limit: at most so many images, taken evenly from all; None for all of them.

    Raises:
        InputError: as `labelled_files`, or a file that is no image.
    """
    files, labels = labelled_files(folder, classes)
    step = 1 if limit is None else max(1, -(-len(files) // limit))
    return [load_image(path, form) for path in files[::step]], labels[::step]
