"""Local training: every client trains its own extractor and classifier alone; the baseline, and the shadow of other methods.

Nothing but a report goes up and nothing comes down, over the same wire as any method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedcg.learning.data import ImageSet
from fedcg.learning.loops import train_classifier
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    LocalResult,
    Method,
    RoundContext,
    ServerState,
    SharedResult,
    Spill,
    TrainingParams,
    Update,
    Weights,
)
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part, Report

PRIVATE = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})


class LocalParams(TrainingParams):
    """Nothing beyond what every method has."""


def init_client(spec: FederationSpec, initial: Mapping[Part, Weights]) -> ClientState:
    """A client starts with the initial extractor and classifier."""
    return ClientState({part: initial[part] for part in sorted(PRIVATE)})


def local_round(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
    """Train extractor and classifier on cross-entropy alone (FedCG eq. 1)."""
    params = LocalParams.model_validate(ctx.spec.params)
    extractor = load_part(ctx.spec, Part.EXTRACTOR, state.parts[Part.EXTRACTOR], ctx.device)
    classifier = load_part(ctx.spec, Part.CLASSIFIER, state.parts[Part.CLASSIFIER], ctx.device)
    loss = train_classifier(extractor, classifier, data.to(ctx.device), params, ctx)
    kept = ClientState({Part.EXTRACTOR: weights_of(extractor), Part.CLASSIFIER: weights_of(classifier)})
    return LocalResult(SharedResult({}), kept, Report(examples=len(data), loss=loss))


def init_server(spec: FederationSpec, initial: Mapping[Part, Weights]) -> ServerState:
    """The server has nothing to keep."""
    return ServerState(Aggregate({}))


class _NothingToMerge:
    """Counts as an aggregator; its aggregate is empty."""

    def __init__(self, state: ServerState, spill: Spill) -> None:
        self._state = state
        self._spill = spill

    def add(self, update: Update) -> None:
        """Note that the client answered."""
        if not self._spill.has(update.client):
            self._spill.put(update.client, {})

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """An aggregate without parts."""
        return self._state.aggregate, self._state


def aggregator(state: ServerState, ctx: RoundContext, spill: Spill) -> _NothingToMerge:
    """The server half of a round."""
    return _NothingToMerge(state, spill)


METHOD = Method(
    name="local",
    title="Local training only (nothing is shared)",
    params_type=LocalParams,
    shared_up=frozenset(),
    shared_down=frozenset(),
    private_parts=PRIVATE,
    needs_label_counts=False,
    init_client=init_client,
    local_round=local_round,
    init_server=init_server,
    aggregator=aggregator,
)
