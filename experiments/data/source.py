"""The images of a data source: single pictures, whose bytes are only read on demand, and the source with their classes.

Also creates sources from arrays and from scikit-learn's digits. Only decodes a few images, to detect their colour mode;
imports no torch.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from experiments.errors import SourceError
from fedcg.learning.data.array_files import ArrayData, LabelledImages, holds_images
from fedcg.learning.data.sources import read_arrays, read_image
from fedcg.learning.errors import DataError
from fedcg.learning.spec import ImageForm, InputForm, TensorForm
from fedcg.values import Value

Pixels = NDArray[np.uint8]


class FilePicture(Value):
    """An image file.

    Attributes:
        path: the file.
        prefix: precedes the file's name, so that names from several folders are unique.
    """

    path: Path
    prefix: str = ""

    @property
    def name(self) -> str:
        """The file's name with the prefix."""
        return self.prefix + self.path.name

    @property
    def where(self) -> str:
        """The file's path."""
        return str(self.path)

    def content(self) -> bytes:
        """Read the file's bytes.

        Raises:
            DataError: not a regular file, or too large for an image.
            OSError: it can't be read.
        """
        return read_image(self.path)


@dataclass(frozen=True, eq=False)
class RowPicture:
    """A row of an array from one file.

    Attributes:
        images: [N, H, W] or [N, H, W, 3] uint8, or tensors [N, ...], shared by all rows.
        row: its index.
        origin: the file, for messages.
        stem: precedes the number in the name, so that names from several arrays are unique.
        compression: zlib level of the PNG. 0 stores the bytes: fast, and equal with every build of zlib.
    """

    images: NDArray[Any]
    row: int
    origin: str
    stem: str = ""
    compression: int = 0

    @property
    def name(self) -> str:
        """The stem, row and `.png`."""
        return f"{self.stem}{self.row:0{max(4, len(str(len(self.images) - 1)))}d}.png"

    @property
    def where(self) -> str:
        """The file and row."""
        return f"{self.origin}#{self.row}"

    @property
    def is_tensor(self) -> bool:
        """Whether the row is a tensor and not an image."""
        return not holds_images(self.images.shape, self.images.dtype)

    def content(self) -> bytes:
        """Return the image as a lossless PNG file; for a tensor, its numbers."""
        if self.is_tensor:
            return bytes(self.images[self.row].tobytes())
        buffer = io.BytesIO()
        Image.fromarray(self.images[self.row]).save(buffer, "PNG", compress_level=self.compression)
        return buffer.getvalue()


Picture = FilePicture | RowPicture
"""One image. Its `content`, the bytes of its image file, is only read on demand.

Its `name` is unique within its class; `where` is its name in messages.
"""

PicturesPerClass = tuple[tuple[Picture, ...], ...]


def rows_per_class(
    images: NDArray[Any], labels: NDArray[np.int64], classes: int, origin: str, *, stem: str = "", compression: int = 0
) -> PicturesPerClass:
    """Return the rows of an array as pictures, per class and in row order."""
    return tuple(
        tuple(RowPicture(images, int(row), origin, stem, compression) for row in np.flatnonzero(labels == label))
        for label in range(classes)
    )


DIGITS = "digits"
DIGITS_DOMAINS = "digits-domains"
TORCHVISION = "torchvision:"
_GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
_LOOKED_AT = 16


class Source(Value):
    """Images per class, in name order; `test` is None if the source has no test part.

    Attributes:
        name: the source's name in records.
        classes: class names in the order of the labels.
        train: for each class its images (all its images when `test` is None).
        test: for each class its test images, or None.
        val: for each class its validation images, or None.
        domains: the same images by domain, all with the same classes; empty without domains.
    """

    name: str
    classes: tuple[str, ...]
    train: PicturesPerClass
    test: PicturesPerClass | None
    val: PicturesPerClass | None = None
    domains: tuple[Source, ...] = ()

    def input_form(self, size: int) -> InputForm:
        """Return the form for these tensors, or for these images at size x size pixels: grey if the first ones are all grey, else colour."""
        first = next(_firsts(self.train))
        if isinstance(first, RowPicture) and first.is_tensor:
            shape, kind = first.images.shape[1:], str(first.images.dtype)
            return TensorForm.model_validate({"kind": "tensor", "shape": shape, "dtype": kind})
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
    """Return whether an image is grey. A damaged one counts as grey, so that the others decide; decoding reports and skips it."""
    if picture is None:
        return True
    if isinstance(picture, RowPicture):
        return picture.images.ndim == 3
    if not picture.path.is_file():  # opening a FIFO would block forever
        return True
    try:
        with Image.open(picture.path) as image:
            return image.mode in _GREY_MODES
    except (OSError, SyntaxError, ValueError):
        return True


def by_domain(name: str, domains: Sequence[Source]) -> Source:
    """Join domains into one source, with the images of all and by domain.

    The result has a test or validation part if every domain has one. Otherwise test images are among the training
    images.
    """
    tests, vals = _together([one.test for one in domains]), _together([one.val for one in domains])
    trains = _together(
        [one.train if tests is not None or one.test is None else _together([one.train, one.test]) for one in domains]
    )
    return Source(name, domains[0].classes, trains or (), tests, vals, tuple(domains))


def _together(parts: Sequence[PicturesPerClass | None]) -> PicturesPerClass | None:
    """Return the parts' images per class, or None if a part is missing."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return tuple(tuple(itertools.chain.from_iterable(of_class)) for of_class in zip(*found, strict=True))


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: real scans, 8 x 8 grey. They are part of scikit-learn, so nothing is downloaded."""
    scans, labels = read_digits()
    return Source(DIGITS, tuple("0123456789"), rows_per_class(scans, labels, 10, DIGITS, compression=1), None)


def read_digits() -> tuple[Pixels, NDArray[np.int64]]:
    """Return the scans, [1797, 8, 8] with their 17 grey levels (0-16) scaled to 0-255, and their labels.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    with gzip.open(sklearn_file("data/digits.csv.gz")) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)  # 64 levels and the label
    scaled = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return scaled, rows[:, -1]


def sklearn_file(name: str) -> Path:
    """Return a file of scikit-learn's data sets. scikit-learn is not imported, because that takes longer than reading the images.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    return Path(spec.origin).parent / "datasets" / name


def file_source(path: Path) -> Source:
    """Open an `.npz` file.

    Raises:
        SourceError: the file is damaged, over the limits, or has mismatched labels; names the file.
    """
    try:
        data = read_arrays(path)
    except DataError as error:
        raise SourceError(str(error)) from error
    return array_source(path.stem, data)


def array_source(name: str, data: ArrayData) -> Source:
    """Make a source from arrays. The labels of the training part are the classes, in order.

    Raises:
        SourceError: fewer than two classes, a label without a name, or a test label without training images.
    """
    used = np.unique(data.train.labels)
    if len(used) < 2:
        raise SourceError(f"{data.train.file}: all images have the same label; at least 2 classes are needed")
    if data.classes is not None and int(used[-1]) >= len(data.classes):
        raise SourceError(f"{data.train.file}: label {int(used[-1])}, but only {len(data.classes)} class names")
    width = len(str(int(used[-1])))
    classes = tuple(f"{label:0{width}d}" if data.classes is None else _tidy(data.classes[label]) for label in used)
    if len(set(classes)) < len(classes):
        raise SourceError(f"{data.train.file}: two classes have the same name: {', '.join(classes)}")
    parts = {part: _pictures(images, used) for part, images in data.parts().items()}
    return Source(name, classes, parts["train"], parts.get("test"), parts.get("val"))


def _tidy(name: str) -> str:
    """Turn a class name into a folder name of letters, digits, `_` and `-`; other characters become `-`."""
    return re.sub(r"[^\w]+", "-", name).strip("-") or "unnamed"


def _pictures(images: LabelledImages, used: np.ndarray) -> PicturesPerClass:
    strange = np.setdiff1d(images.labels, used)
    if len(strange):
        raise SourceError(f"{images.file}: label {int(strange[0])}, which no training image has")
    return rows_per_class(images.images, np.searchsorted(used, images.labels), len(used), f"{images.file.name}")
