"""Data sets of one's own: `dataset:NAME` is an entry point of the group `fedcg.datasets`, a function that gives a torch Dataset.

The device's own configuration names it, so importing it is that device's choice; nothing that comes over the wire can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedcg.learning.data.formats.arrays import ArrayData, LabelledImages, checked_shape
from fedcg.learning.data.formats.detect import DATASET_PREFIX as PREFIX
from fedcg.learning.data.formats.detect import installed_dataset
from fedcg.learning.errors import DataError


def own_dataset(name: str, classes: Sequence[str]) -> ArrayData:
    """Call the entry point `name` and read all that it gives.

    It gives a map-style torch Dataset of (image, label), or a mapping of such with the keys `train`, `test` and perhaps `val`.
    An image is a Pillow image, a uint8 array [H, W] or [H, W, 3], or a uint8 tensor [C, H, W]; all have the same size. A label
    is an index into the spec's classes, or a class's name.

    Raises:
        DataError: no such entry point, or images and labels of another kind.
    """
    given = installed_dataset(name).load()()
    parts = given if isinstance(given, Mapping) else {"train": given}
    if "train" not in parts or not set(parts) <= {"train", "val", "test"}:
        raise DataError(
            f"{PREFIX}{name}: gives the parts {', '.join(map(str, parts))}; expected train, test, perhaps val"
        )
    read = {part: _read(f"{PREFIX}{name}", dataset, classes) for part, dataset in parts.items()}
    return ArrayData(read["train"], read.get("test"), read.get("val"))


def _read(name: str, dataset: Any, classes: Sequence[str]) -> LabelledImages:
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(f"{name}: not a map-style Dataset: it has no length") from error
    if count == 0:
        raise DataError(f"{name}: holds no image")
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for row in range(count):
        where = f"{name}#{row}"
        try:
            image, label = dataset[row]
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: not a pair of image and label ({error})") from error
        images.append(_pixels(image, where))
        labels.append(_label(label, where, classes))
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"{where}: an image of {images[-1].shape} after one of {images[0].shape}: give all the same form"
            )
        if row == 0:
            checked_shape((count, *images[0].shape), Path(name))
    return LabelledImages(np.stack(images), np.array(labels, dtype=np.int64), Path(name))


def _pixels(image: object, where: str) -> NDArray[np.uint8]:
    if isinstance(image, Image.Image):
        image = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    elif isinstance(image, torch.Tensor):
        image = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise DataError(
            f"{where}: give a Pillow image, a uint8 array [H, W] or [H, W, 3], or a uint8 tensor [C, H, W] (no floats: "
            "the spec normalises)"
        )
    if image.ndim == 3 and image.shape[2] != 3:
        raise DataError(f"{where}: an image of {image.shape[2]} channels; 1 or 3 are read")
    return image


def _label(label: object, where: str, classes: Sequence[str]) -> int:
    if isinstance(label, str):
        if label not in classes:
            raise DataError(f"{where}: the spec has no class {label!r}; its classes are {', '.join(classes)}")
        return list(classes).index(label)
    if isinstance(label, (int, np.integer)) or (isinstance(label, torch.Tensor) and label.numel() == 1):
        return int(label)
    raise DataError(f"{where}: a label must be an index or a class name, not {type(label).__name__}")
