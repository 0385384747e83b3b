"""Converts between torch tensors and the numpy arrays of store and wire. Always copies. Uses torch."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedcg.learning.method import Weights

Array = NDArray[np.float32] | NDArray[np.int64]
Name = TypeVar("Name", bound=str)
"""Name of a group of tensors: a part, or a group of a method's extras."""


def to_arrays(parts: Mapping[Name, Weights]) -> dict[Name, dict[str, Array]]:
    """Weights as numpy arrays on the CPU, in their own memory.

    Raises:
        TypeError: not a tensor, or a tensor subclass, which may carry more than its numbers.
    """
    for part, weights in parts.items():
        for name, tensor in weights.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError(f"{part}/{name} is of type {type(tensor).__name__}; only plain tensors leave training")
    return {
        part: {name: cast(Array, tensor.detach().cpu().numpy().copy()) for name, tensor in weights.items()}
        for part, weights in parts.items()
    }


def to_weights(parts: Mapping[Name, Mapping[str, NDArray[Any]]]) -> dict[Name, Weights]:
    """Numpy arrays as torch tensors on the CPU, in their own memory."""
    return {
        part: {name: torch.from_numpy(np.array(array, order="C", copy=True)) for name, array in arrays.items()}
        for part, arrays in parts.items()
    }
