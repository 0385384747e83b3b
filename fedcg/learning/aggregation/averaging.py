"""Weighted averages of weights, updated as clients arrive: one client's weights in memory at a time, in any order.

Floating-point tensors, BatchNorm's running statistics among them, are summed exactly (`exact_sum`), so that the order of arrival
never shows. Integer tensors (BatchNorm's `num_batches_tracked`) are counters that nothing here computes with (momentum is
fixed): the largest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedcg.learning.aggregation.exact_sum import ExactSum
from fedcg.learning.aggregation.robust_statistics import WEIGHTS, combined, flat_weights, with_weights
from fedcg.learning.method import Aggregate, Combination, ServerState, Spill, Update
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights


VELOCITY = "velocity"


class WeightedSums:
    """Σ_i w_i θ_i of named tensors, and Σ_i w_i."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}
        self._counters: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._total: float = 0  # whole numbers: exact, whatever their order

    def add(self, weight: float, tensors: Weights) -> None:
        """Count one client's tensors; the same names and shapes as all others.

        Raises:
            ValueError: a weight that is not positive.
            DivergedError: a tensor that is not finite.
        """
        if weight <= 0:
            raise ValueError(f"a client's weight must be positive, not {weight}")
        self._total += weight
        for name, tensor in tensors.items():
            self._dtypes[name] = tensor.dtype
            if tensor.is_floating_point():
                self._sums.setdefault(name, ExactSum()).add(tensor, weight)
            elif name in self._counters:
                self._counters[name] = torch.maximum(self._counters[name], tensor)
            else:
                self._counters[name] = tensor.clone()

    def average(self) -> dict[str, torch.Tensor]:
        """Σ_i w_i θ_i / Σ_i w_i, in the tensors' own types.

        Raises:
            ValueError: no client.
        """
        if not self._dtypes:
            raise ValueError("no client to average")
        return {
            name: (self._sums[name].value() / self._total).to(dtype)
            if name in self._sums
            else self._counters[name].clone()
            for name, dtype in self._dtypes.items()
        }


def weighted_average(clients: Iterable[tuple[float, Weights]]) -> dict[str, torch.Tensor]:
    """Σ_i w_i θ_i / Σ_i w_i (FedCG alg. 2 line 2; FedMD-CG alg. 1 line 20 with w_i = n_i), whatever the order.

    Args:
        clients: (weight > 0, tensors) of each client; the same names and shapes everywhere. Weights are whole numbers: their
            sum must not depend on its order either.

    Raises:
        ValueError: no client, or a weight that is not positive.
    """
    sums = WeightedSums()
    for weight, tensors in clients:
        sums.add(weight, tensors)
    return sums.average()


@dataclass(frozen=True)
class Merged:
    """The average of some updates, and what they reported.

    Attributes:
        parts: averaged weights per part.
        examples: n_i per client, in client-id order.
        label_counts: n_i^y per client, for those that reported them, in client-id order.
    """

    parts: dict[Part, dict[str, torch.Tensor]]
    examples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]


class RunningAverage:
    """The average by number of examples of the updates added so far."""

    def __init__(self, parts: frozenset[Part]) -> None:
        self._parts = sorted(parts)
        self._sums = WeightedSums()
        self._examples: dict[str, int] = {}
        self._label_counts: dict[str, tuple[int, ...]] = {}

    @property
    def clients(self) -> frozenset[str]:
        """Whose updates are in the sums."""
        return frozenset(self._examples)

    def add(self, update: Update) -> None:
        """Count an update; a second time it counts for nothing.

        Raises:
            DivergedError: a tensor that is not finite.
        """
        if update.client in self._examples:
            return
        flat = {f"{part.value}/{name}": tensor for part in self._parts for name, tensor in update.parts[part].items()}
        self._sums.add(update.examples, flat)
        self._examples[update.client] = update.examples
        if update.label_counts is not None:
            self._label_counts[update.client] = update.label_counts

    def merged(self) -> Merged:
        """The average of all updates added.

        Raises:
            ValueError: no update.
        """
        if not self._examples:
            raise ValueError("no client to average")
        parts: dict[Part, dict[str, torch.Tensor]] = {part: {} for part in self._parts}
        for key, tensor in (self._sums.average() if self._parts else {}).items():
            part, name = key.split("/", 1)
            parts[Part(part)][name] = tensor
        return Merged(parts, dict(sorted(self._examples.items())), dict(sorted(self._label_counts.items())))


def robust_rows(update: Update, parts: frozenset[Part], average: Combination) -> dict[str, torch.Tensor]:
    """What an update spills for `robust_average`: nothing for a mean."""
    return {} if average == "mean" else {WEIGHTS: flat_weights({part: update.parts[part] for part in parts})}


def robust_average(merged: Merged, spill: Spill, average: Combination) -> Merged:
    """A merge with the statistic of its clients' spilled weights in the place of their mean; integers stay."""
    if average == "mean":
        return merged
    flat = combined(spill, merged.examples, WEIGHTS, average)
    return replace(merged, parts=with_weights(merged.parts, flat))


class AverageAggregator:
    """FedAvg's server half: the average by number of examples, of updates in any order.

    Args:
        parts: what to average.
        spill: records who was added; holds weights for another average than the mean.
        average: of the weights.
    """

    def __init__(self, parts: frozenset[Part], spill: Spill, average: Combination = "mean") -> None:
        self._parts = parts
        self._spill = spill
        self._how = average
        self._average = RunningAverage(parts)

    @property
    def merged(self) -> Merged:
        """The average of the updates added so far, and what they reported."""
        return robust_average(self._average.merged(), self._spill, self._how)

    def add(self, update: Update) -> None:
        """Count an update."""
        self._average.add(update)
        if not self._spill.has(update.client):
            rows = robust_rows(update, self._parts, self._how)
            self._spill.put(update.client, {"examples": torch.tensor(update.examples), **rows})

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """The average of exactly these updates, those that were not added loaded in client-id order, one at a time."""
        if not self._average.clients <= updates.keys():
            self._average = RunningAverage(self._parts)
        for client in sorted(updates.keys() - self._average.clients):
            self.add(updates[client]())
        aggregate = Aggregate(self.merged.parts)
        return aggregate, ServerState(aggregate)


class WithMomentum:
    """An average whose classifier goes on in the direction of the rounds before: v ← βv + (average - c), c ← c + v (Hsu et al. 2019).

    Args:
        average: of the clients' weights.
        state: from before the round; holds v, which is 0 before the first.
        momentum: β.
    """

    def __init__(self, average: AverageAggregator, state: ServerState, momentum: float) -> None:
        self._average, self._state, self._momentum = average, state, momentum

    def add(self, update: Update) -> None:
        """Count an update."""
        self._average.add(update)

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """The average of exactly these updates, its classifier with momentum; integers are those of the average."""
        aggregate, _ = self._average.finish(updates)
        before, found = self._state.aggregate.parts[Part.CLASSIFIER], aggregate.parts[Part.CLASSIFIER]
        known, velocity, moved = self._state.extras.get(VELOCITY, {}), dict[str, torch.Tensor](), dict(found)
        for name, tensor in found.items():
            if tensor.is_floating_point():
                step = tensor - before[name]
                velocity[name] = step + self._momentum * known[name] if name in known else step
                moved[name] = before[name] + velocity[name]
        aggregate = replace(aggregate, parts={**aggregate.parts, Part.CLASSIFIER: moved})
        return aggregate, ServerState(aggregate, {VELOCITY: velocity})


class PartsAverage:
    """In the place of a method's own server half where that can't run: the average, and the rest of the aggregate as it was.

    Args:
        shared: parts of the updates.
        state: from before the round.
        spill: as `AverageAggregator`'s.
    """

    def __init__(self, shared: frozenset[Part], state: ServerState, spill: Spill) -> None:
        self._state = state
        self._average = AverageAggregator(shared & state.aggregate.parts.keys(), spill)

    def add(self, update: Update) -> None:
        """Count an update."""
        self._average.add(update)

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """The average of exactly these updates, beside the parts that no update holds."""
        averaged = self._average.finish(updates)[0].parts
        aggregate = replace(self._state.aggregate, parts={**self._state.aggregate.parts, **averaged})
        return aggregate, replace(self._state, aggregate=aggregate)
