"""What the readers of this package give, and the bounds and checks that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcg.learning.errors import DataError

# The largest public set of this kind, EMNIST by class, has 814,255 images and 640 MB; more than this is a mistake or an attack.
MAX_BYTES = 2 << 30
MAX_IMAGES = 4_000_000
MAX_SIDE = 4096


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One part of a data set.

    Attributes:
        images: [N, H, W] (grey) or [N, H, W, 3] uint8.
        labels: [N] int64, not negative.
        file: the file of the images, for messages and names.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    file: Path

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A data set read from array files.

    Attributes:
        train: the training part, or everything where the set comes in one piece.
        test: the test part, where there is one.
        val: the validation part, where there is one.
        classes: class names in label order, where the files name them.
    """

    train: LabelledImages
    test: LabelledImages | None = None
    val: LabelledImages | None = None
    classes: tuple[str, ...] | None = None

    def parts(self) -> dict[str, LabelledImages]:
        """The parts that are there, by name, in the order train, val, test."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def checked_shape(shape: tuple[int, ...], where: Path) -> int:
    """The number of bytes of uint8 images of this shape.

    Raises:
        DataError: not [N, H, W] or [N, H, W, 1 or 3], nothing in it, or over the bounds.
    """
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise DataError(f"{where}: images must be uint8 [N, H, W] or [N, H, W, 1 or 3], not {list(shape)}")
    if min(shape) < 1:
        raise DataError(f"{where}: holds no image (shape {list(shape)})")
    size = int(np.prod([int(side) for side in shape], dtype=object))
    if shape[0] > MAX_IMAGES or max(shape[1:]) > MAX_SIDE or size > MAX_BYTES:
        raise DataError(
            f"{where}: declares {list(shape)}: over the limit of {MAX_IMAGES} images of {MAX_SIDE}x{MAX_SIDE} "
            f"and {MAX_BYTES >> 20} MiB"
        )
    return size


def labelled(images: NDArray[np.uint8], labels: NDArray[np.int64], file: Path, labels_file: Path) -> LabelledImages:
    """Images with their labels; a last axis of one channel is dropped.

    Raises:
        DataError: not one label per image, or a negative one.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != images.shape[:1]:
        raise DataError(f"{labels_file}: {list(labels.shape)} labels for the {len(images)} images of {file}")
    if int(labels.min()) < 0:
        raise DataError(f"{labels_file}: a negative label ({int(labels.min())})")
    return LabelledImages(images[..., 0] if images.ndim == 4 and images.shape[3] == 1 else images, labels, file)
