"""One image of a data source, wherever it lies: a file name for it, the bytes of an image file, and its pixels. Torch-free.

Everything that deals images out handles these; only who trains or writes folders ever asks for bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcg.learning.data.sources import read_image

Pixels = NDArray[np.uint8]


class Picture(Protocol):
    """One image: a value that costs next to nothing until its bytes are asked for."""

    @property
    def name(self) -> str:
        """The file name that it has, or gets when it is written; unique within its class."""

    @property
    def where(self) -> str:
        """What to call it in a message: a path, or a file and a row."""

    @property
    def file(self) -> Path | None:
        """The image file, where there is one that can be linked to."""

    def content(self) -> bytes:
        """The bytes of its image file."""


PicturesPerClass = tuple[tuple[Picture, ...], ...]


@dataclass(frozen=True)
class FilePicture:
    """An image file.

    Attributes:
        path: the file.
        prefix: put before the file's name, so that files of several folders stay apart in one.
    """

    path: Path
    prefix: str = ""

    @property
    def name(self) -> str:
        """The file's own name behind the prefix."""
        return self.prefix + self.path.name

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def file(self) -> Path | None:
        """The path."""
        return self.path

    def content(self) -> bytes:
        """The file's bytes.

        Raises:
            DataError: not a regular file, or too large for an image.
            OSError: it can't be read.
        """
        return read_image(self.path)


@dataclass(frozen=True, eq=False)
class RowPicture:
    """A row of an array that came out of one file.

    Attributes:
        images: [N, H, W] or [N, H, W, 3] uint8, shared by all rows.
        row: which.
        origin: the file, for messages.
        stem: begins the name, so that rows of several arrays stay apart in one folder.
        compression: zlib level of the PNG. 0 stores: the same bytes with every build of zlib, and fast.
    """

    images: Pixels
    row: int
    origin: str
    stem: str = ""
    compression: int = 0

    @property
    def name(self) -> str:
        """Stem, row and `.png`."""
        return f"{self.stem}{self.row:0{max(4, len(str(len(self.images) - 1)))}d}.png"

    @property
    def where(self) -> str:
        """File and row."""
        return f"{self.origin}#{self.row}"

    @property
    def file(self) -> Path | None:
        """None: there is no file of this one image."""
        return None

    def content(self) -> bytes:
        """The image as a PNG file, without loss."""
        buffer = io.BytesIO()
        Image.fromarray(self.images[self.row]).save(buffer, "PNG", compress_level=self.compression)
        return buffer.getvalue()


def rows_per_class(
    images: Pixels, labels: NDArray[np.int64], classes: int, origin: str, *, stem: str = "", compression: int = 0
) -> PicturesPerClass:
    """The rows of an array as pictures, per class and in row order."""
    return tuple(
        tuple(RowPicture(images, int(row), origin, stem, compression) for row in np.flatnonzero(labels == label))
        for label in range(classes)
    )
