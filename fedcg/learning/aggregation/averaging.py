"""Averages of clients' weights, updated as clients arrive, in any order: exact weighted sums, medians and trimmed means, and the files that hold clients' rows until a round is merged.

Floating-point tensors, BatchNorm's running statistics among them, are summed exactly (`ExactSum`), so that the order of arrival
never shows. Integer tensors (BatchNorm's `num_batches_tracked`) are counters that nothing here computes with (momentum is
fixed): the largest is kept.

`ExactSum` gives weighted sums that are the same bit for bit whatever the order of their terms. A floating-point sum depends on the order of its terms, so updates could only be summed once all of them are there. Integer
addition does not: every term is rounded ONCE to a multiple of 2^-32, by itself, and is added in two 64-bit integers.

Why nothing overflows: a term is held within ±2^52, so its coarse limb (units of 2^10) is at most 2^42 and its fine limb (units of
2^-32, of a rest of at most 2^9) at most 2^41; `MOST_TERMS` = 2^20 of them stay below 2^62.
Why it is precise enough: a term n x is off by at most 2^-33, so a mean Σ n x / Σ n with counts n >= 1 is off by at most
2^-33 ≈ 1.2e-10; half a unit in the last place of a float32 is larger for every value above 0.002.

Medians and trimmed means (Yin et al., ICML 2018): every client counts once, whatever number of examples it reports. Values come from the row store, a block of
coordinates of all clients at a time, so that memory stays flat; they are sorted, so that the order of clients never shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedcg.files import replace_durably
from fedcg.learning.errors import ExtensionError
from fedcg.learning.method import Aggregate, Aggregator, Combination, DivergedError, ServerState, Spill, Update, Weights
from fedcg.wire.parts import Part

MOST_TERMS = 1 << 20
_COARSE = 2.0**10
_FINE = 2.0**-32
# a weight of 1e6 examples times a value of 4e9: whatever is larger is broken or hostile, and saturates
_LIMIT = 2.0**52


class ExactSum:
    """Σ_i w_i x_i of float tensors of one shape, on the CPU; a function of the terms alone, not of their order."""

    def __init__(self) -> None:
        self._coarse: torch.Tensor | None = None
        self._fine = torch.zeros(())
        self._terms = 0

    def add(self, values: torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add one term.

        Args:
            values: float tensor.
            weight: w_i >= 0, a number or a tensor that broadcasts to `values`; whole numbers (counts) lose nothing.

        Raises:
            DivergedError: a value is not finite.
            OverflowError: more than `MOST_TERMS` terms.
        """
        if self._terms == MOST_TERMS:
            raise OverflowError(f"an exact sum has room for {MOST_TERMS} terms")
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
        """The sum as float64, of the terms' shape.

        Raises:
            ValueError: nothing was added.
        """
        if self._coarse is None:
            raise ValueError("nothing was added to this sum")
        return self._coarse.to(torch.float64).mul_(_COARSE).add_(self._fine.to(torch.float64), alpha=_FINE)


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


VELOCITY = "velocity"
Updates = Mapping[str, Callable[[], Update]]
"""How the updates of a round are loaded, by client."""


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
        if not self._total:
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
        beside: averages of what was averaged beside the weights, by name.
    """

    parts: dict[Part, dict[str, torch.Tensor]]
    examples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]
    beside: dict[str, torch.Tensor]


class AverageAggregator:
    """FedAvg's server half: the average by number of examples, of updates in any order.

    Args:
        parts: what to average.
        spill: records who was added; holds weights for another average than the mean.
        average: of the weights.
        rows: further tensors of an update to spill; asked for where the spill has none of its client.
        beside: of a client whose rows are spilled, tensors by name that are averaged beside its weights.
    """

    def __init__(
        self,
        parts: frozenset[Part],
        spill: Spill,
        average: Combination = "mean",
        rows: Callable[[Update], Weights] = lambda update: {},
        beside: Callable[[str], Weights] = lambda client: {},
    ) -> None:
        self._parts, self._spill, self._how = sorted(parts), spill, average
        self._rows, self._beside = rows, beside
        self._begin()

    def _begin(self) -> None:
        self._sums, self._sums_beside = {part: WeightedSums() for part in self._parts}, WeightedSums()
        self._examples: dict[str, int] = {}
        self._label_counts: dict[str, tuple[int, ...]] = {}

    def add(self, update: Update) -> None:
        """Count an update; a second time it counts for nothing.

        Raises:
            DivergedError: a tensor that is not finite.
            ExtensionError: the method shares fewer parts than it has averaged.
        """
        client = update.client
        if client in self._examples:
            return
        if lacking := sorted(part.value for part in self._parts if part not in update.parts):
            raise ExtensionError(f"the aggregator averages {', '.join(lacking)}, which no update of this method has")
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
        """The average of exactly these updates, those that were not added loaded in client-id order, one at a time.

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
        """The average of exactly these updates, as `settle` gives it."""
        aggregate = Aggregate(self.settle(updates).parts)
        return aggregate, ServerState(aggregate)


@dataclass(frozen=True)
class Then:
    """An aggregator whose result is changed when it is there.

    Attributes:
        inner: takes the updates.
        change: (its aggregate, the updates) to the server's state, with the aggregate that comes down.
    """

    inner: Aggregator
    change: Callable[[Aggregate, Updates], ServerState]

    def add(self, update: Update) -> None:
        """Count an update."""
        self.inner.add(update)

    def finish(self, updates: Updates) -> tuple[Aggregate, ServerState]:
        """Of exactly these updates."""
        state = self.change(self.inner.finish(updates)[0], updates)
        return state.aggregate, state


def with_momentum(average: Aggregate, state: ServerState, momentum: float) -> ServerState:
    """The classifier goes on in the direction of the rounds before: v ← βv + (average - c), c ← c + v (Hsu et al. 2019).

    Args:
        average: of the clients' weights; its integers stay.
        state: from before the round; holds v, which is 0 before the first.
        momentum: β.
    """
    before, found = state.aggregate.parts[Part.CLASSIFIER], average.parts[Part.CLASSIFIER]
    known, velocity, moved = state.extras.get(VELOCITY, {}), dict[str, torch.Tensor](), dict(found)
    for name, tensor in found.items():
        if tensor.is_floating_point():
            step = tensor - before[name]
            velocity[name] = step + momentum * known[name] if name in known else step
            moved[name] = before[name] + velocity[name]
    aggregate = replace(average, parts={**average.parts, Part.CLASSIFIER: moved})
    return ServerState(aggregate, {VELOCITY: velocity})


def parts_average(shared: frozenset[Part], state: ServerState, spill: Spill) -> Aggregator:
    """In the place of a method's own server half where that can't run: the average, and the rest of the aggregate as it was.

    Args:
        shared: parts of the updates.
        state: from before the round.
        spill: as `AverageAggregator`'s.
    """

    def beside_the_rest(average: Aggregate, _: Updates) -> ServerState:
        parts = {**state.aggregate.parts, **average.parts}
        return replace(state, aggregate=replace(state.aggregate, parts=parts))

    return Then(AverageAggregator(shared & state.aggregate.parts.keys(), spill), beside_the_rest)


class DirectorySpill:
    """Rows of teacher passes, one file per client; a file that is there is complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: str, tensors: Weights) -> None:
        """Keep a client's rows durably."""
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
