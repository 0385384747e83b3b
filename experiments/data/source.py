"""Where the images of an experiment come from: `open_source` reads any of the forms that docs/data.md names.

Knows names, classes and where the images lie; decodes nothing but a few first images, to learn their colour mode.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from experiments.data.lazy_images import Picture, PicturesPerClass, Pixels, RowPicture, rows_per_class
from fedcg.learning.spec import ImageForm

DIGITS = "digits"
DIGITS_DOMAINS = "digits-domains"
TORCHVISION = "torchvision:"
_GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
_LOOKED_AT = 16


@dataclass(frozen=True)
class Source:
    """Images per class, in name order; `test` is None where the source comes in one piece.

    Attributes:
        name: what the source is called in records.
        classes: class names in the order of the labels.
        train: for each class its images (all its images when `test` is None).
        test: for each class its test images, or None.
        val: for each class its validation images, where the source brings such.
        domains: the same images by domain, all with the same classes; empty where there are none.
    """

    name: str
    classes: tuple[str, ...]
    train: PicturesPerClass
    test: PicturesPerClass | None
    val: PicturesPerClass | None = None
    domains: tuple[Source, ...] = ()

    def image_form(self, size: int) -> ImageForm:
        """The form that fits these images at size x size pixels: grey if the first ones all are, else colour."""
        parts = self.domains or (self,)
        grey = all(
            _is_grey(picture)
            for part in parts
            for picture in itertools.islice(_firsts(part.train), max(2, _LOOKED_AT // len(parts)))
        )
        half = (0.5,) if grey else (0.5, 0.5, 0.5)
        return ImageForm(mode="L" if grey else "RGB", height=size, width=size, mean=half, std=half)


def _firsts(pictures: PicturesPerClass) -> itertools.chain[Picture]:
    return itertools.chain.from_iterable(itertools.zip_longest(*(of_class[:2] for of_class in pictures if of_class)))


def _is_grey(picture: Picture | None) -> bool:
    """Whether an image is grey. A damaged one counts as grey, so that the others decide; it is named and skipped when it is decoded."""
    if picture is None:
        return True
    if isinstance(picture, RowPicture):
        return picture.images.ndim == 3
    if picture.file is None or not picture.file.is_file():  # whoever opens a FIFO waits for ever
        return True
    try:
        with Image.open(picture.file) as image:
            return image.mode in _GREY_MODES
    except (OSError, SyntaxError, ValueError):
        return True


def by_domain(name: str, domains: Sequence[Source]) -> Source:
    """The domains as one source: their images together, and each for itself.

    A test or validation part is there when every domain has one; without it, test images are among the training images.
    """
    tests, vals = _together([one.test for one in domains]), _together([one.val for one in domains])
    trains = _together(
        [one.train if tests is not None or one.test is None else _together([one.train, one.test]) for one in domains]
    )
    return Source(name, domains[0].classes, trains or (), tests, vals, tuple(domains))


def _together(parts: Sequence[PicturesPerClass | None]) -> PicturesPerClass | None:
    """The parts' images per class, or None when a part is missing."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return tuple(tuple(itertools.chain.from_iterable(of_class)) for of_class in zip(*found, strict=True))


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: real scans, 8 x 8 grey. Nothing is downloaded: the images come with scikit-learn."""
    scans, labels = read_digits()
    return Source(DIGITS, tuple("0123456789"), rows_per_class(scans, labels, 10, DIGITS, compression=1), None)


def read_digits() -> tuple[Pixels, NDArray[np.int64]]:
    """The scans, [1797, 8, 8] with their 17 grey levels (0-16) spread over 0-255, and their labels.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    with gzip.open(sklearn_file("data/digits.csv.gz")) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)  # 64 levels and the label
    scaled = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return scaled, rows[:, -1]


def sklearn_file(name: str) -> Path:
    """A file of scikit-learn's data sets. scikit-learn itself is not imported: that takes longer than all else that reads images.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    return Path(spec.origin).parent / "datasets" / name
