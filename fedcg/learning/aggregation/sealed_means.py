"""The server half of a method with partly sealed updates: merges the clear parts and passes on sealed sums, which only the cohort can read.

A simulation computes the sums with the same integers that devices send (`fedcg.wire.sealed_numbers`). The coordinator
receives masked sums. In both cases parts that a round does not exchange stay unchanged in the aggregate.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from fedcg.learning import method as fl
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.values import Value
from fedcg.wire.errors import WireError
from fedcg.wire.parts import Part
from fedcg.wire.sealed_numbers import added, clipped, from_numbers, to_numbers

Updates = Mapping[str, Callable[[], fl.Update]]


def merged(
    found: tuple[fl.Aggregate, fl.ServerState], before: fl.ServerState, sealed: fl.Parts, sums: Collection[object] = ()
) -> tuple[fl.Aggregate, fl.ServerState]:
    """The aggregate of a round and the server's state: clear and sealed parts of the round, and the rest unchanged.

    Args:
        found: the result for the clear parts.
        before: the state from before the round.
        sealed: the sealed parts; empty if their sum could not be opened.
        sums: everything needed to open the sealed parts of the aggregate.
    """
    parts = {**before.aggregate.parts, **found[0].parts, **sealed}
    aggregate = fl.Aggregate(parts, found[0].label_distribution, tuple(sums))
    return aggregate, fl.ServerState(aggregate, {**before.extras, **found[1].extras})


def server_half(method: fl.Method, state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """A method's aggregator as a simulation runs it, with sealed parts averaged in the clear."""
    inner = method.aggregator(state, ctx, spill)
    return _BesideSums(inner, state, ctx) if ctx.spec.sealed else inner


class _BesideSums(Value):
    inner: fl.Aggregator
    state: fl.ServerState
    ctx: fl.RoundContext

    def add(self, update: fl.Update) -> None:
        self.inner.add(self._clear(update))

    def finish(self, updates: Updates) -> tuple[fl.Aggregate, fl.ServerState]:
        loaded = {client: updates[client]() for client in sorted(updates)}
        total = sum(update.examples for update in loaded.values())
        shares = {client: clipped(update.examples, total) / total for client, update in loaded.items()}
        sealed = {part: self._mean(part, loaded, shares) for part in self.ctx.spec.sealed_in(self.ctx.round)}
        found = self.inner.finish({client: partial(self._clear, update) for client, update in loaded.items()})
        return merged(found, self.state, sealed)

    def _clear(self, update: fl.Update) -> fl.Update:
        sealed = self.ctx.spec.sealed
        return replace(update, parts={part: one for part, one in update.parts.items() if part not in sealed})

    def _mean(self, part: Part, updates: Mapping[str, fl.Update], shares: Mapping[str, float]) -> fl.Weights:
        told = {client: to_arrays({part: update.parts[part]})[part] for client, update in updates.items()}
        layouts, most = self.ctx.spec.layouts[part], range_of(self.ctx.spec)
        try:
            total = added([to_numbers(told[client], layouts, most, shares[client]) for client in sorted(told)])
            return to_weights({part: from_numbers(total, layouts, most)})[part]
        except WireError as error:
            raise fl.DivergedError(f"{part.value}: {error}") from error


def range_of(spec: FederationSpec) -> float:
    """The limit of sealed numbers whose layout has none."""
    assert spec.sealed_range is not None
    return spec.sealed_range
