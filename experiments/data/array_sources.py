"""Arrays of labelled images as a source: IDX and CIFAR files, `.npz`, and what torchvision gives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from experiments.data.lazy_images import PicturesPerClass, rows_per_class
from experiments.data.source import Source
from experiments.errors import SourceError
from fedcg.learning.data.array_files import ArrayData, LabelledImages
from fedcg.learning.data.sources import read_arrays
from fedcg.learning.errors import DataError


def file_source(path: Path) -> Source:
    """Read an `.npz`, or a folder with IDX or CIFAR files.

    Raises:
        SourceError: damaged, over the limits, or with labels that don't fit; names the file.
    """
    try:
        data = read_arrays(path)
    except DataError as error:
        raise SourceError(str(error)) from error
    if data is None:
        raise SourceError(f"{path} holds no IDX or CIFAR files")
    return array_source(path.stem if path.suffix else path.name, data)


def array_source(name: str, data: ArrayData) -> Source:
    """Arrays as a source. The labels that occur in the training part are the classes, in order.

    Raises:
        SourceError: fewer than two classes, a label without a name, or a test label that no training image has.
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
    parts = {part: _pictures(name, part, images, used) for part, images in data.parts().items()}
    return Source(name, classes, parts["train"], parts.get("test"), parts.get("val"))


def _tidy(name: str) -> str:
    """A class name that can be a folder's: letters, digits, `_`, `-` and single spaces' place taken by `-`."""
    return re.sub(r"[^\w]+", "-", name).strip("-") or "unnamed"


def _pictures(name: str, part: str, images: LabelledImages, used: np.ndarray) -> PicturesPerClass:
    strange = np.setdiff1d(images.labels, used)
    if len(strange):
        raise SourceError(f"{images.file}: label {int(strange[0])}, which no training image has")
    return rows_per_class(images.images, np.searchsorted(used, images.labels), len(used), f"{images.file.name}")
