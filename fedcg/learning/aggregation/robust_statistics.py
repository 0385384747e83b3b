"""Medians and trimmed means over clients, coordinate by coordinate: what a minority of clients sends does not move them far.

(Yin et al., ICML 2018.) Every client counts once, whatever number of examples it reports. Values come from the row store, a block of
coordinates of all clients at a time, so that memory stays flat; they are sorted, so that the order of clients never shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from fedcg.learning.method import Combination, DivergedError, Spill, Weights
from fedcg.wire.parts import Part

TRIMMED = 0.2
"""Share of the clients that a trimmed mean leaves out at either end; at least one of three or more."""
BLOCK_NUMBERS = 1 << 23
"""So many numbers are sorted at a time: 64 MB of float64."""
WEIGHTS = "weights"


def combine(values: torch.Tensor, how: Combination) -> torch.Tensor:
    """The median or trimmed mean over clients, [N, ...] -> [...] float64; of an even N the mean of the two in the middle.

    Raises:
        DivergedError: a value is not finite.
    """
    ordered = values.to(torch.float64).sort(dim=0).values
    if not ordered.isfinite().all():
        raise DivergedError("a weight or an output of an update is not finite")
    most = (len(ordered) - 1) // 2
    cut = {"mean": 0, "median": most, "trimmed": min(most, max(1, round(TRIMMED * len(ordered))))}[how]
    return ordered[cut : len(ordered) - cut].mean(dim=0)


def combined(
    spill: Spill,
    clients: Collection[str],
    name: str,
    how: Combination,
    of: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """`combine` of one spilled tensor of each client, block by block of its first dimension.

    Args:
        spill: holds the tensor of every client, all of one shape.
        clients: at least one.
        name: of the tensor.
        how: median or trimmed mean.
        of: what of a block of rows is combined.
    """
    first = spill.get(min(clients))[name]
    rows = max(1, BLOCK_NUMBERS // max(1, len(clients) * first[:1].numel()))
    blocks = []
    for start in range(0, len(first), rows):
        some = slice(start, start + rows)
        blocks.append(combine(torch.stack([of(spill.get(client)[name][some]) for client in sorted(clients)]), how))
    return torch.cat(blocks)


def flat_weights(parts: Mapping[Part, Weights]) -> torch.Tensor:
    """The floating-point tensors of some parts, one after the other by name, [P] float32."""
    flat = [tensor.reshape(-1).to(torch.float32) for _, _, tensor in _floats(parts)]
    return torch.cat(flat) if flat else torch.zeros(0)


def with_weights(parts: Mapping[Part, Weights], flat: torch.Tensor) -> dict[Part, dict[str, torch.Tensor]]:
    """The parts with the numbers of `flat` (as `flat_weights` orders them) in their floating-point tensors."""
    changed = {part: dict(weights) for part, weights in parts.items()}
    start = 0
    for part, name, tensor in _floats(parts):
        numbers = flat[start : start + tensor.numel()]
        changed[part][name] = numbers.reshape(tensor.shape).to(tensor.dtype)
        start += tensor.numel()
    return changed


def _floats(parts: Mapping[Part, Weights]) -> list[tuple[Part, str, torch.Tensor]]:
    return [
        (part, name, tensor)
        for part, weights in sorted(parts.items())
        for name, tensor in sorted(weights.items())
        if tensor.is_floating_point()
    ]
