"""Reads a data set from the user's code into tensors: a sequence of (x, y), a pair of arrays, or rows with named columns.

Everything is read into memory once, in order. An unusable sample is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcg.errors import told
from fedcg.learning.data.frames import Samples
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet

_INPUTS = ("image", "img", "pixel_values", "input", "inputs", "x", "features")
_LABELS = ("label", "labels", "y", "target")
_MOST_BYTES = 1 << 36


def read_dataset(data: object, classes: Sequence[str], where: str) -> ImageSet:
    """All samples of a data set.

    Args:
        data: (inputs [N, *shape], labels [N]) as two arrays or tensors; or a sequence of (x, y) such as a torch Dataset; or of mappings
            with an input and a label. An input is uint8, or becomes float32; a PIL image becomes [C, H, W].
        classes: names; a label is an index into them.
        where: for messages, e.g. "client a: train".

    Raises:
        DataError: names `where`, the sample and the problem.
    """
    if isinstance(data, Samples):
        if data.classes not in (None, tuple(classes)):
            raise DataError(
                f"{where}: its classes are {', '.join(data.classes)}: set the client's classes to the same names"
            )
        data = (data.inputs, data.labels)
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(hasattr(one, "shape") for one in data):
        inputs, labels = _array(data[0], where), _array(data[1], where)
        if len(inputs) != len(labels) or not len(labels):
            raise DataError(f"{where}: {len(inputs)} inputs and {len(labels)} labels; give one label for each")
    else:
        inputs, labels = _stacked(data, where)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels are {labels.dtype} {list(labels.shape[1:])}, not one integer per sample: the index of its class"
        )
    if len(outside := np.flatnonzero((labels < 0) | (labels >= len(classes)))):
        wrong = int(labels[outside[0]])
        raise DataError(
            f"{where}: sample {outside[0]} has label {wrong}; with {len(classes)} classes it is 0 to {len(classes) - 1}"
        )
    if inputs.dtype != np.uint8:
        inputs = inputs.astype(np.float32, copy=False)
        if len(wild := np.flatnonzero(~np.isfinite(inputs.reshape(len(inputs), -1)).all(1))):
            raise DataError(f"{where}: sample {wild[0]} has a number that is not finite (NaN or too large for float32)")
    return ImageSet(
        torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(labels.astype(np.int64)), tuple(classes)
    )


def _stacked(data: object, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs and labels of a sequence of samples, in arrays allocated once their size is known."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"{where}: a {type(data).__name__} is not a data set: pass a sequence of (x, y), or arrays (inputs, labels); "
            "wrap an iterable in list(...)"
        )
    inputs, labels = np.empty(0), np.empty(0)
    for number, (x, y) in enumerate(_samples(data, where)):
        if number == 0:
            if len(data) * max(1, x.nbytes) > _MOST_BYTES:
                raise DataError(f"{where}: {len(data)} samples of {x.nbytes:,} bytes do not fit into memory")
            dtype = np.uint8 if x.dtype == np.uint8 else np.float32
            inputs, labels = np.empty((len(data), *x.shape), dtype), np.empty((len(data), *y.shape), y.dtype)
        if x.shape != inputs.shape[1:] or (x.dtype == np.uint8) != (inputs.dtype == np.uint8):
            first = f"{np.dtype(inputs.dtype).name} {list(inputs.shape[1:])}"
            raise DataError(
                f"{where}: sample {number} is {x.dtype} {list(x.shape)}, but sample 0 is {first}: all samples need one shape and type"
            )
        if y.shape != labels.shape[1:] or y.dtype.kind != labels.dtype.kind:
            raise DataError(
                f"{where}: sample {number} has a label of another shape or type ({y.dtype} {list(y.shape)}) than sample 0"
            )
        inputs[number], labels[number] = x, y
    if len(inputs) == 0:
        raise DataError(f"{where}: the data set has no samples")
    return inputs, labels


def _samples(data: Any, where: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for number in range(len(data)):
        name = f"{where}: sample {number}"
        try:
            sample = data[number]
        except Exception as error:
            raise DataError(f"{name} can't be read: {told(error)}") from error
        if isinstance(sample, Mapping):
            yield tuple(_array(_column(sample, names, name), name) for names in (_INPUTS, _LABELS))  # type: ignore[misc]
        elif isinstance(sample, (tuple, list)) and len(sample) == 2:
            yield _array(sample[0], name), _array(sample[1], name)
        else:
            found = f"{len(sample)} things" if isinstance(sample, (tuple, list)) else f"a {type(sample).__name__}"
            raise DataError(f"{name} is {found}, not (x, y)")


def _column(sample: Mapping[str, object], names: Sequence[str], where: str) -> object:
    found = next((name for name in names if name in sample), None)
    if found is None:
        raise DataError(
            f"{where} has the columns {', '.join(map(str, sample))}, but needs one called {' or '.join(names)}"
        )
    return sample[found]


def _array(value: Any, where: str) -> NDArray[Any]:
    """Numbers as an array; a PIL image as [C, H, W]."""
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except Exception as error:
        raise DataError(f"{where}: a {type(value).__name__} can't be read as numbers: {error}") from error
    if array.dtype.kind not in "buif":
        raise DataError(f"{where}: a {type(value).__name__} does not hold numbers")
    if hasattr(value, "getbands"):
        array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array
