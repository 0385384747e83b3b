"""Where the images of an experiment come from: `open_source` reads any of the forms that docs/data.md names.

Knows names, classes and where the images lie; decodes nothing but a few first images, to learn their colour mode.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from experiments.errors import SourceError
from experiments.pictures import FilePicture, Picture, PicturesPerClass, RowPicture, rows_per_class
from fedcg.learning.spec import ImageForm

DIGITS = "digits"
SUFFIXES = (".png", ".jpg", ".jpeg")
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
    """A damaged image says nothing about the others: whoever decodes it names and skips it."""
    if picture is None:
        return True
    if isinstance(picture, RowPicture):
        return picture.images.ndim == 3
    try:
        with Image.open(picture.file or "") as image:
            return image.mode in _GREY_MODES
    except (OSError, SyntaxError, ValueError):
        return True


def open_source(text: str) -> Source:
    """Open the images that a person names: `digits` or a folder of class folders.

    Raises:
        SourceError: nothing usable; names the file or folder and says what was expected.
    """
    if text == DIGITS:
        return digits()
    return folder_source(Path(text))


def _files(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return tuple(folder / name for name in names if name.lower().endswith(SUFFIXES))


def _class_folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def folder_source(root: Path) -> Source:
    """The images in `root/class/*.png|jpg`, or in `root/train/class/*` and `root/test/class/*`, perhaps `root/val/class/*`.

    Raises:
        SourceError: no such folder, fewer than two classes, different classes in the parts, or an empty class.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder")
    split = (root / "train").is_dir() and (root / "test").is_dir()
    top = root / "train" if split else root
    classes = tuple(_class_folders(top))
    if len(classes) < 2:
        raise SourceError(f"{top} holds {len(classes)} class folder(s), at least 2 are needed: {top}/CLASS/*.png")
    parts = {"train": _pictures(top, classes)}
    for part in ("test", "val") if split else ():
        if part == "test" or (root / part).is_dir():
            if _class_folders(root / part) != list(classes):
                raise SourceError(f"{root}/train and {root}/{part} do not hold the same class folders")
            parts[part] = _pictures(root / part, classes)
    return Source(root.name, classes, parts["train"], parts.get("test"), parts.get("val"))


def _pictures(top: Path, classes: tuple[str, ...]) -> PicturesPerClass:
    pictures = tuple(tuple(map(FilePicture, _files(top / name))) for name in classes)
    for name, of_class in zip(classes, pictures, strict=True):
        if not of_class:
            raise SourceError(f"{top / name} holds no image ({', '.join(SUFFIXES)})")
    return pictures


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: real scans, 8 x 8 grey; the 17 grey levels (0-16) are spread over 0-255.

    Nothing is downloaded: the images come with scikit-learn.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    pictures = rows_per_class(scaled, labels.astype(np.int64), 10, DIGITS, compression=1)
    return Source(DIGITS, tuple("0123456789"), pictures, None)


def write_digits(root: Path) -> Source:
    """Write the digits as PNG files `root/DIGIT/NNNN.png`, to be looked at or used as an ordinary folder."""
    source = digits()
    for name, of_class in zip(source.classes, source.train, strict=True):
        (root / name).mkdir(parents=True, exist_ok=True)
        for picture in of_class:
            (root / name / picture.name).write_bytes(picture.content())
    written = folder_source(root)
    return Source(DIGITS, written.classes, written.train, written.test)
