"""Averages of clients' weights in any order of arrival: exact weighted sums, medians and trimmed means, and the spill files of a round.

Floating-point tensors, including BatchNorm's running statistics, are summed exactly (`ExactSum`), so the order of
arrival has no effect. Integer tensors (BatchNorm's `num_batches_tracked`) are counters without effect here (momentum is
fixed): the largest is kept.

`ExactSum` gives weighted sums that are bit-identical in any order of terms. A floating-point sum depends on the order,
so updates could only be summed after all have arrived. Integer addition does not: every term is rounded ONCE to a
multiple of 2^-32 and added to two 64-bit integers.

Overflow is impossible: a term is clamped to ±2^52. Its coarse limb (units of 2^10) is at most 2^42, and its fine limb
(units of 2^-32, of a rest of at most 2^9) at most 2^41. `MOST_TERMS` = 2^20 of them stay below 2^62. The precision
suffices: the error of a term n x is at most 2^-33. So the error of a mean Σ n x / Σ n with counts n >= 1 is at most
2^-33 ≈ 1.2e-10. Half a unit in the last place of a float32 is larger for every value above 0.002.

Medians and trimmed means (Yin et al., ICML 2018): every client counts once, regardless of its reported number of
examples. Values are read from the row store in blocks of coordinates of all clients, so memory stays constant. They are
sorted, so the order of clients has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedcg.files import replace_durably
from fedcg.learning.errors import ExtensionError
from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    Combination,
    DivergedError,
    Parts,
    ServerState,
    Spill,
    Update,
    Weights,
)
from fedcg.values import Value
from fedcg.wire.parts import Part

MOST_TERMS = 1 << 20
_COARSE = 2.0**10
_FINE = 2.0**-32
# a weight of 1e6 examples times a value of 4e9; larger terms are faulty or hostile and saturate
_LIMIT = 2.0**52


class ExactSum:
    """Σ_i w_i x_i of float tensors of one shape, on the CPU; it depends only on the terms, not on their order."""

    def __init__(self) -> None:
        self._coarse: torch.Tensor | None = None
        self._fine = torch.zeros(())
        self._terms = 0

    def add(self, values: torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add one term.

        Args:
            values: float tensor.
            weight: w_i >= 0, a number or a tensor that broadcasts to `values`; integers (counts) are exact.

        Raises:
            DivergedError: a value is not finite.
            OverflowError: more than `MOST_TERMS` terms.
        """
        if self._terms == MOST_TERMS:
            raise OverflowError(f"an exact sum supports at most {MOST_TERMS} terms")
        term = values.detach().to("cpu", torch.float64) * weight
        if not term.isfinite().all():
            raise DivergedError("a weight or an output of an update is not finite")
        term = term.clamp(-_LIMIT, _LIMIT)
        coarse = torch.round(term / _COARSE)
        fine = term.sub_(coarse, alpha=_COARSE).div_(_FINE).round_()
        if self._coarse is None:
            self._coarse, self._fine = coarse.to(torch.int64), fine.to(torch.int64)
        else:
            self._coarse += coarse.to(torch.int64)
            self._fine += fine.to(torch.int64)
        self._terms += 1

    def value(self) -> torch.Tensor:
        """The sum as float64, in the terms' shape.

        Raises:
            ValueError: nothing was added.
        """
        if self._coarse is None:
            raise ValueError("nothing was added to this sum")
        return self._coarse.to(torch.float64).mul_(_COARSE).add_(self._fine.to(torch.float64), alpha=_FINE)


TRIMMED = 0.2
"""Share of clients that a trimmed mean drops at each end; at least one of three or more."""
BLOCK_NUMBERS = 1 << 23
"""How many numbers are sorted at a time: 64 MB of float64."""
WEIGHTS = "weights"


def combine(values: torch.Tensor, how: Combination) -> torch.Tensor:
    """The median or trimmed mean over clients, [N, ...] -> [...] float64; for even N the mean of the two in the middle.

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
    """`combine` one spilled tensor of each client, in blocks along its first dimension.

    Args:
        spill: contains the tensor of every client, all of one shape.
        clients: at least one.
        name: name of the tensor.
        how: median or trimmed mean.
        of: function of a block of rows whose result is combined.
    """
    first = spill.get(min(clients))[name]
    rows = max(1, BLOCK_NUMBERS // max(1, len(clients) * first[:1].numel()))
    blocks = []
    for start in range(0, len(first), rows):
        some = slice(start, start + rows)
        blocks.append(combine(torch.stack([of(spill.get(client)[name][some]) for client in sorted(clients)]), how))
    return torch.cat(blocks)


def flat_weights(parts: Parts) -> torch.Tensor:
    """The floating-point tensors of some parts, concatenated by name, [P] float32."""
    flat = [tensor.reshape(-1).to(torch.float32) for _, _, tensor in _floats(parts)]
    return torch.cat(flat) if flat else torch.zeros(0)


def with_weights(parts: Parts, flat: torch.Tensor) -> dict[Part, dict[str, torch.Tensor]]:
    """The parts with the numbers of `flat` (as `flat_weights` orders them) in their floating-point tensors."""
    changed = {part: dict(weights) for part, weights in parts.items()}
    start = 0
    for part, name, tensor in _floats(parts):
        numbers = flat[start : start + tensor.numel()]
        changed[part][name] = numbers.reshape(tensor.shape).to(tensor.dtype)
        start += tensor.numel()
    return changed


def _floats(parts: Parts) -> list[tuple[Part, str, torch.Tensor]]:
    return [
        (part, name, tensor)
        for part, weights in sorted(parts.items())
        for name, tensor in sorted(weights.items())
        if tensor.is_floating_point()
    ]


VELOCITY = "velocity"
Updates = Mapping[str, Callable[[], Update]]
"""Loaders of a round's updates, by client."""


class WeightedSums:
    """Σ_i w_i θ_i of named tensors, and Σ_i w_i."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}
        self._counters: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._total: float = 0  # integers: exact in any order

    def add(self, weight: float, tensors: Weights) -> None:
        """Add one client's tensors, with the same names and shapes as all others; its weight is positive.

        Raises:
            DivergedError: a tensor that is not finite.
        """
        self._total += weight
        for name, tensor in tensors.items():
            self._dtypes[name] = tensor.dtype
            if tensor.is_floating_point():
                self._sums.setdefault(name, ExactSum()).add(tensor, weight)
            else:
                self._counters[name] = torch.maximum(self._counters.get(name, tensor), tensor)

    def average(self) -> dict[str, torch.Tensor]:
        """Σ_i w_i θ_i / Σ_i w_i, in the tensors' original types.

        Raises:
            ValueError: no client.
        """
        if not self._total:
            raise ValueError("no client to average")
        return {
            name: (self._sums[name].value() / self._total).to(dtype)
            if name in self._sums
            else self._counters[name].clone()
            for name, dtype in self._dtypes.items()
        }


def weighted_average(clients: Iterable[tuple[float, Weights]]) -> dict[str, torch.Tensor]:
    """Σ_i w_i θ_i / Σ_i w_i (FedCG alg. 2 line 2; FedMD-CG alg. 1 line 20 with w_i = n_i), in any order.

    Args:
        clients: (weight > 0, tensors) of each client; with equal names and shapes. Weights are integers, so that their
            sum does not depend on the order either.

    Raises:
        ValueError: no client.
    """
    sums = WeightedSums()
    for weight, tensors in clients:
        sums.add(weight, tensors)
    return sums.average()


class Merged(Value):
    """The average of some updates, and their reports.

    Attributes:
        parts: averaged weights per part.
        examples: n_i per client, in client-id order.
        label_counts: n_i^y per client, for those that reported them, in client-id order.
        beside: averages of further tensors, by name.
    """

    parts: dict[Part, dict[str, torch.Tensor]]
    examples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]
    beside: dict[str, torch.Tensor]


class AverageAggregator:
    """FedAvg's server half: the average by number of examples, of updates in any order.

    Args:
        parts: what to average.
        spill: records which clients were added; stores weights for averages other than the mean.
        average: how weights are averaged.
        rows: (update) -> further tensors to spill; called if the spill has none for the client.
        beside: (client with spilled rows) -> further tensors to average, by name.
        then: (the average, the updates) -> the server's state with the final aggregate.
    """

    def __init__(
        self,
        parts: frozenset[Part],
        spill: Spill,
        average: Combination = "mean",
        rows: Callable[[Update], Weights] = lambda update: {},
        beside: Callable[[str], Weights] = lambda client: {},
        then: Callable[[Merged, Updates], ServerState] = lambda merged, _: ServerState(Aggregate(merged.parts)),
    ) -> None:
        self._parts, self._spill, self._how = sorted(parts), spill, average
        self._rows, self._beside, self._then = rows, beside, then
        self._begin()

    def _begin(self) -> None:
        self._sums, self._sums_beside = {part: WeightedSums() for part in self._parts}, WeightedSums()
        self._examples: dict[str, int] = {}
        self._label_counts: dict[str, tuple[int, ...]] = {}

    def add(self, update: Update) -> None:
        """Count an update. Repeated calls have no effect.

        Raises:
            DivergedError: a tensor that is not finite.
            ExtensionError: the method shares fewer parts than it averages.
        """
        client = update.client
        if client in self._examples:
            return
        if lacking := sorted(part.value for part in self._parts if part not in update.parts):
            raise ExtensionError(f"the aggregator averages {', '.join(lacking)}, but updates of this method lack it")
        if not self._spill.has(client):
            weights = {part: update.parts[part] for part in self._parts}
            robust = {} if self._how == "mean" else {WEIGHTS: flat_weights(weights)}
            self._spill.put(client, {"examples": torch.tensor(update.examples), **robust, **self._rows(update)})
        for part, sums in self._sums.items():
            sums.add(update.examples, update.parts[part])
        self._sums_beside.add(update.examples, self._beside(client))
        self._examples[client] = update.examples
        if update.label_counts is not None:
            self._label_counts[client] = update.label_counts

    def settle(self, updates: Updates) -> Merged:
        """The average of exactly these updates. Updates that were not added are loaded one at a time, in client-id order.

        Raises:
            ValueError: no update.
            DivergedError: a tensor that is not finite.
        """
        if not self._examples.keys() <= updates.keys():
            self._begin()
        for client in sorted(updates.keys() - self._examples.keys()):
            self.add(updates[client]())
        beside, parts = self._sums_beside.average(), {part: sums.average() for part, sums in self._sums.items()}
        if self._how != "mean":
            parts = with_weights(parts, combined(self._spill, self._examples, WEIGHTS, self._how))
        return Merged(parts, dict(sorted(self._examples.items())), dict(sorted(self._label_counts.items())), beside)

    def finish(self, updates: Updates) -> tuple[Aggregate, ServerState]:
        """The average of exactly these updates, from `settle`, processed by `then`."""
        state = self._then(self.settle(updates), updates)
        return state.aggregate, state


def with_momentum(merged: Merged, state: ServerState, momentum: float) -> ServerState:
    """Apply server momentum to the classifier: v ← βv + (average - c), c ← c + v (Hsu et al. 2019).

    Args:
        merged: average of the clients' weights; its integers are not changed.
        state: from before the round, with v, which is 0 before the first.
        momentum: β.
    """
    before, found = state.aggregate.parts[Part.CLASSIFIER], merged.parts[Part.CLASSIFIER]
    known, velocity, moved = state.extras.get(VELOCITY, {}), dict[str, torch.Tensor](), dict(found)
    for name, tensor in found.items():
        if tensor.is_floating_point():
            step = tensor - before[name]
            velocity[name] = step + momentum * known[name] if name in known else step
            moved[name] = before[name] + velocity[name]
    return ServerState(Aggregate({**merged.parts, Part.CLASSIFIER: moved}), {VELOCITY: velocity})


def parts_average(shared: frozenset[Part], state: ServerState, spill: Spill) -> Aggregator:
    """Replaces a method's server half that can't run: the average, and the rest of the aggregate unchanged.

    Args:
        shared: parts of the updates.
        state: from before the round.
        spill: as for `AverageAggregator`.
    """

    def beside_the_rest(merged: Merged, _: Updates) -> ServerState:
        parts = {**state.aggregate.parts, **merged.parts}
        return replace(state, aggregate=replace(state.aggregate, parts=parts))

    return AverageAggregator(shared & state.aggregate.parts.keys(), spill, then=beside_the_rest)


class DirectorySpill:
    """Rows of teacher passes, one file per client. An existing file is complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: str, tensors: Weights) -> None:
        """Store a client's rows durably."""
        from safetensors.torch import save

        rows = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        replace_durably(self._path(client), save(rows))

    def get(self, client: str) -> Weights:
        """A client's rows."""
        from safetensors.torch import load

        rows: Weights = load(self._path(client).read_bytes())
        return rows

    def has(self, client: str) -> bool:
        """Whether a client's rows are complete."""
        return self._path(client).is_file()

    def _path(self, client: str) -> Path:
        return self._directory / f"{client}.safetensors"
