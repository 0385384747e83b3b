"""Labelled images from a folder, `CLASS/*.png` and so on, in the form a model takes; numpy and Pillow only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.errors import InputError
from export.model.classify import expand
from export.model.preprocess import load_image
from fedcg.imaging import ImageForm, Pixels


def labelled_images(
    folder: Path, classes: Sequence[str], form: ImageForm, limit: int | None = None
) -> tuple[list[Pixels], list[int]]:
    """Images under `folder/CLASS/` and the index of their class, in order of class and path.

    Args:
        folder: one folder per class; a class may be missing.
        classes: the model's class names.
        form: mode and size that the model takes.
        limit: at most so many images, taken evenly from all; None for all of them.

    Raises:
        InputError: no such folder, a folder that is no class, a file that is no image, or no image at all.
    """
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder")
    strange = sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name not in classes)
    if strange:
        raise InputError(
            str(folder / strange[0]), f"the model has no such class; its classes are {', '.join(classes[:20])}"
        )
    found = [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in expand([str(folder / name)])
        if path.is_file()
    ]
    if not found:
        raise InputError(str(folder), f"no images; expected {folder}/CLASS/*.png or .jpg")
    step = 1 if limit is None else max(1, -(-len(found) // limit))
    chosen = found[::step]
    return [load_image(path, form) for path, _ in chosen], [label for _, label in chosen]
