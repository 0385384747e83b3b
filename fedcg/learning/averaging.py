"""Weighted averages of weights, streamed: one client's weights in memory at a time.

Floating-point tensors, BatchNorm's running statistics among them, are averaged in float64. Integer tensors (BatchNorm's
`num_batches_tracked`) are counters that nothing here computes with (momentum is fixed): the largest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Update, Weights


def weighted_average(clients: Iterable[tuple[float, Weights]]) -> dict[str, torch.Tensor]:
    """Σ_i w_i θ_i / Σ_i w_i (FedCG alg. 2 line 2; FedMD-CG alg. 1 line 20 with w_i = n_i).

    The sum runs in the order given: give clients in id order, and the result does not depend on who arrived first.

    Args:
        clients: (weight > 0, tensors) of each client; the same names and shapes everywhere.

    Raises:
        ValueError: no client, or a weight that is not positive.
    """
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    total = 0.0
    for weight, tensors in clients:
        if weight <= 0:
            raise ValueError(f"a client's weight must be positive, not {weight}")
        total += weight
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype
            if not tensor.is_floating_point():
                sums[name] = torch.maximum(sums[name], tensor) if name in sums else tensor.clone()
            elif name in sums:
                sums[name].add_(tensor.to(torch.float64), alpha=weight)
            else:
                sums[name] = tensor.to(torch.float64) * weight
    if not sums:
        raise ValueError("no client to average")
    return {
        name: (value / total).to(dtypes[name]) if value.is_floating_point() else value for name, value in sums.items()
    }


@dataclass(frozen=True)
class Merged:
    """The average of some updates, and what their reports said.

    Attributes:
        parts: averaged weights per part.
        examples: n_i per client, in client-id order.
        label_counts: n_i^y per client, for those that told.
    """

    parts: dict[Part, dict[str, torch.Tensor]]
    examples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]


def average_updates(updates: Mapping[str, Callable[[], Update]], parts: frozenset[Part]) -> Merged:
    """Average some parts of all updates by number of examples, in client-id order, one update loaded at a time.

    Raises:
        ValueError: no update.
    """
    examples: dict[str, int] = {}
    label_counts: dict[str, tuple[int, ...]] = {}

    def clients() -> Iterator[tuple[float, Weights]]:
        for client in sorted(updates):
            update = updates[client]()
            examples[client] = update.examples
            if update.label_counts is not None:
                label_counts[client] = update.label_counts
            flat = {f"{part.value}/{name}": tensor for part in parts for name, tensor in update.parts[part].items()}
            yield float(update.examples), flat

    merged: dict[Part, dict[str, torch.Tensor]] = {part: {} for part in sorted(parts)}
    for key, tensor in weighted_average(clients()).items():
        part, name = key.split("/", 1)
        merged[Part(part)][name] = tensor
    return Merged(merged, examples, label_counts)
