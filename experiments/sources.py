"""Where the images of an experiment come from: a folder of class folders, or scikit-learn's handwritten digits.

Knows file names and classes only; decodes nothing but a few first images, to learn their colour mode.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from experiments.errors import SourceError
from fedcg.learning.spec import ImageForm

DIGITS = "digits"
SUFFIXES = (".png", ".jpg", ".jpeg")
_GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
_LOOKED_AT = 16

FilesPerClass = tuple[tuple[Path, ...], ...]


@dataclass(frozen=True)
class Source:
    """Image files per class, in name order; `test` is None where the source comes in one piece.

    Attributes:
        classes: class names in the order of the labels.
        train: for each class its files (all its files when `test` is None).
        test: for each class its test files, or None.
    """

    name: str
    classes: tuple[str, ...]
    train: FilesPerClass
    test: FilesPerClass | None

    def image_form(self, size: int) -> ImageForm:
        """The form that fits these images at size x size pixels: grey if the first ones all are, else colour."""
        firsts = itertools.chain.from_iterable(
            zip(*(files[:2] for files in self.train if len(files) > 1), strict=False)
        )
        grey = all(_is_grey(path) for path in itertools.islice(firsts, _LOOKED_AT))
        half = (0.5,) if grey else (0.5, 0.5, 0.5)
        return ImageForm(mode="L" if grey else "RGB", height=size, width=size, mean=half, std=half)


def _is_grey(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.mode in _GREY_MODES
    except OSError as error:
        raise SourceError(f"{path} can't be read as an image: {error}") from error


def _files(folder: Path) -> tuple[Path, ...]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    return tuple(folder / name for name in names if name.lower().endswith(SUFFIXES))


def _class_folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def folder_source(root: Path) -> Source:
    """The images in `root/class/*.png|jpg`, or in `root/train/class/*` and `root/test/class/*`.

    Raises:
        SourceError: no such folder, fewer than two classes, different classes in train and test, or an empty class.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder")
    split = (root / "train").is_dir() and (root / "test").is_dir()
    top = root / "train" if split else root
    classes = tuple(_class_folders(top))
    if len(classes) < 2:
        raise SourceError(f"{top} holds {len(classes)} class folder(s), at least 2 are needed: {top}/CLASS/*.png")
    if split and _class_folders(root / "test") != list(classes):
        raise SourceError(f"{root}/train and {root}/test do not hold the same class folders")
    train = tuple(_files(top / name) for name in classes)
    test = tuple(_files(root / "test" / name) for name in classes) if split else None
    for part, folders in (("train" if split else ".", train), ("test", test or ())):
        for name, files in zip(classes, folders, strict=False):
            if not files:
                raise SourceError(f"{root / part / name} holds no image ({', '.join(SUFFIXES)})")
    return Source(root.name, classes, train, test)


def write_digits(root: Path) -> Source:
    """Write scikit-learn's 1,797 handwritten digits (real scans, 8 x 8 grey) as PNG files `root/DIGIT/NNNN.png`.

    The 17 grey levels (0-16) are spread over 0-255. Nothing is downloaded: the images come with scikit-learn.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    for label in range(10):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
    for index, (image, label) in enumerate(zip(scaled, labels, strict=True)):
        Image.fromarray(image, mode=None).save(root / str(label) / f"{index:04d}.png", compress_level=1)
    source = folder_source(root)
    return Source(DIGITS, source.classes, source.train, source.test)
