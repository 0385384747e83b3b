"""Converts tensors to the integers of a sealed sum, and a sum to their weighted mean.

A number v within [low, high] of its layout becomes round(2^27 · share · (v - middle) / half). With shares of at most 0.4 the sum of 32
devices stays within 2^31, so it is unique modulo 2^32. The share itself comes first, so a sum of fewer devices than announced weights
still gives their weighted mean. Places for tags follow (`fedcg.wire.sums.tagged`). Integer tensors (batch norm's counters) are not sent;
a mean has zeros for them.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedcg.wire.errors import CodecError, SumError
from fedcg.wire.parts import MAX_SUM_DEVICES, TAGS, TensorLayout

Numbers = npt.NDArray[np.uint32]
Array = npt.NDArray[np.float32] | npt.NDArray[np.int64] | npt.NDArray[np.uint32]
MOST_SHARE = 0.4
"""The largest share of one device in a mean: a mean that one device dominates would reveal its numbers."""
STEPS = 1 << 27
assert STEPS * MOST_SHARE * MAX_SUM_DEVICES < 1 << 31
_TOLERANCE = 1e-5


def clipped(weight: int, together: int) -> float:
    """The effective weight among weights with the sum `together`: at most `MOST_SHARE` of the mean, unless another is lowered too."""
    return min(weight, (together - weight) * MOST_SHARE / (1 - MOST_SHARE))


def added(parts: Sequence[Numbers]) -> Numbers:
    """Their sum modulo 2^32, [size]; at least one."""
    return functools.reduce(np.add, parts)


def bounded(layouts: Sequence[TensorLayout], most: float) -> tuple[TensorLayout, ...]:
    """The floating-point tensors of a part, each with two bounds: its own, or -most and most."""
    return tuple(
        layout
        if layout.low is not None and layout.high is not None
        else layout.model_copy(update={"low": -most, "high": most})
        for layout in layouts
        if layout.dtype == "float32"
    )


def number_count(layouts: Sequence[TensorLayout]) -> int:
    """The count of a part's numbers in a sum: its floating-point tensors, the share and the tags."""
    return 1 + TAGS + sum(math.prod(layout.shape) for layout in layouts if layout.dtype == "float32")


def to_numbers(tensors: Mapping[str, Array], layouts: Sequence[TensorLayout], most: float, share: float) -> Numbers:
    """A device's part of a sum, [number_count] uint32, modulo 2^32.

    Args:
        tensors: of one part, finite.
        layouts: of its tensors.
        most: bound for tensors without their own bounds.
        share: of the device in the mean, in (0, MOST_SHARE].

    Raises:
        CodecError: a number outside its bounds; names the tensor.
    """
    pieces = [np.array([np.rint(STEPS * share)]), np.zeros(TAGS)]
    for layout in bounded(layouts, most):
        array = tensors[layout.name]
        middle, half = _middle_and_half(layout)
        if array.size and float(np.abs(array - middle).max()) > half:
            advice = ": plan with a larger sealed_range" if (layout.low, layout.high) == (-most, most) else ""
            raise CodecError(
                f"tensor {layout.name} holds numbers outside {layout.low:g} to {layout.high:g}, which a sealed sum can't "
                f"hold{advice}"
            )
        pieces.append(np.rint(STEPS * share * ((array.astype(np.float64).reshape(-1) - middle) / half)))
    return (np.concatenate(pieces).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def from_numbers(numbers: Numbers, layouts: Sequence[TensorLayout], most: float) -> dict[str, Array]:
    """The weighted mean in an opened sum of a part.

    Raises:
        SumError: it is not a mean: it was opened with another secret, or a device sent invalid numbers.
    """
    signed = numbers.view(np.int32).astype(np.float64) / STEPS
    total, rest = float(signed[0]), signed[1 + TAGS :]
    if not 0.0 < total <= 1.0 + _TOLERANCE:
        raise SumError("the shares in a sum don't add up: another secret opened it, or a device sent false ones")
    if np.abs(rest).max(initial=0.0) > total * (1.0 + _TOLERANCE) + MAX_SUM_DEVICES / STEPS:
        raise SumError(
            "an opened sum is not a mean of numbers in their bounds: it was opened with another secret, or a device sent false ones"
        )
    found: dict[str, Array] = {}
    for layout in bounded(layouts, most):
        size, (middle, half) = math.prod(layout.shape), _middle_and_half(layout)
        mean: npt.NDArray[np.float64] = rest[:size] / total * half + middle
        found[layout.name] = np.clip(mean, layout.low, layout.high).astype(np.float32).reshape(layout.shape)
        rest = rest[size:]
    counters = (layout for layout in layouts if layout.dtype != "float32")
    return found | {layout.name: np.zeros(layout.shape, layout.dtype) for layout in counters}


def _middle_and_half(layout: TensorLayout) -> tuple[float, float]:
    assert layout.low is not None
    assert layout.high is not None
    return (layout.low + layout.high) / 2, (layout.high - layout.low) / 2
