"""Methods that train extractor and classifier by classification and average what they share by data size.

Their local halves differ in the shared parts and in a penalty added to the cross-entropy, their server halves in the
step after averaging. `averaging_method` builds a method from these. FedAvg (McMahan et al., 2017) is the pattern.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import AverageAggregator, with_momentum
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.training.classification import Penalty, train_classifier, with_downloaded_classifier
from fedcg.learning.training.stage import MovingAverage, average_extras, moving_average
from fedcg.learning.training.task_round import task_of, task_round
from fedcg.wire.parts import Part, Report

PERSONAL = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})

Params = TypeVar("Params", bound=fl.TrainingParams)
PenaltyOf = Callable[[Mapping[Part, nn.Module], Params, fl.RoundContext], Penalty | None]
"""(networks as loaded at the start of the round, parameters, context) -> the penalty of the round."""
MakeAggregator = Callable[[fl.ServerState, fl.RoundContext, fl.Spill], fl.Aggregator]
LocalRound = Callable[[fl.ClientState, ImageSet, fl.Aggregate | None, fl.RoundContext], fl.LocalResult]


class MomentumParams(fl.TrainingParams):
    """Parameters of methods whose aggregate is the plain average."""

    average: fl.Average = "mean"
    aux: fl.Aux = 0.0
    server_momentum: fl.ServerMomentum = 0.0


def averaging_method(
    name: str,
    title: str,
    params_type: type[Params],
    shared: frozenset[Part],
    *,
    penalty_of: PenaltyOf[Params] | None = None,
    downloads: frozenset[Part] = frozenset(),
    label_counts: fl.LabelCounts = fl.LabelCounts.NEVER,
    aggregator: MakeAggregator | None = None,
    needs_public: bool = False,
) -> fl.Method:
    """A method whose clients train extractor and classifier and share some of these parts.

    Args:
        name: its file's name.
        title: a one-line description.
        params_type: its parameters.
        shared: parts that are uploaded, merged and downloaded; the rest of `PERSONAL` stays private.
        penalty_of: the penalty added to the cross-entropy.
        downloads: parts that are only downloaded and that no client trains.
        label_counts: whether updates report label counts.
        aggregator: the server half; None: averages the shared parts.
        needs_public: whether the server half needs public images.
    """
    return fl.Method(
        name=name,
        title=title,
        params_type=params_type,
        payload=fl.Payload(
            shared, shared | downloads, PERSONAL - shared, sealable=frozenset() if aggregator else shared
        ),
        needs=fl.Needs(label_counts, needs_public),
        local_round=averaged_round(params_type, shared, penalty_of, label_counts),
        aggregator=aggregator or partial(average_of, params_type, shared),
        private_stages=1,
        takes_trainer=aggregator is None and not downloads and shared != {Part.EXTRACTOR},
    )


def average_of(
    params_type: type[fl.TrainingParams],
    shared: frozenset[Part],
    state: fl.ServerState,
    ctx: fl.RoundContext,
    spill: fl.Spill,
) -> fl.Aggregator:
    """The server half that averages these parts, as far as the round exchanges them in the clear."""
    params = params_type.model_validate(ctx.spec.params)
    clear = shared & ctx.spec.shared_in(ctx.round) - frozenset(ctx.spec.sealed)
    how: fl.Combination = getattr(params, "average", "mean")
    momentum: float = getattr(params, "server_momentum", 0.0) if Part.CLASSIFIER in clear else 0.0
    if not momentum:
        return AverageAggregator(clear, spill, how)
    return AverageAggregator(clear, spill, how, then=lambda merged, _: with_momentum(merged, state, momentum))


def local_result(
    nets: Mapping[Part, nn.Module],
    shared: frozenset[Part],
    data: ImageSet,
    loss: float,
    label_counts: fl.LabelCounts,
    averages: Sequence[MovingAverage] = (),
) -> fl.LocalResult:
    """The result of a local round: copies of all networks for the client, of the shared ones for the server, and a report."""
    counts = None if label_counts is fl.LabelCounts.NEVER else data.label_counts()
    return fl.LocalResult(
        fl.SharedResult({part: weights_of(nets[part]) for part in sorted(shared)}),
        fl.ClientState({part: weights_of(net) for part, net in nets.items()}, average_extras(averages)),
        Report(examples=len(data), loss=loss, label_counts=counts),
    )


def averaged_round(
    params_type: type[Params],
    shared: frozenset[Part],
    penalty_of: PenaltyOf[Params] | None,
    label_counts: fl.LabelCounts,
) -> LocalRound:
    """A local half: load the aggregate (without one, the client's own parts), train E and C, keep all, share some."""

    def local_round(
        state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
    ) -> fl.LocalResult:
        params = params_type.model_validate(ctx.spec.params)
        if (task := task_of(ctx.spec)) is not None:
            return task_round(task, shared, params, state, aggregate, ctx)
        weights = {**state.parts, **(aggregate.parts if aggregate else {})}
        nets = {part: load_part(ctx.spec, part, weights[part], ctx.device) for part in sorted(state.parts)}
        data = data.to(ctx.device)
        penalty = penalty_of(nets, params, ctx) if penalty_of else None
        if aggregate is not None and Part.CLASSIFIER in aggregate.parts:
            aux: float = getattr(params, "aux", 0.0)
            penalty = with_downloaded_classifier(penalty, nets[Part.CLASSIFIER], aux, ctx)
        average = moving_average(nets, params)
        loss = train_classifier(nets[Part.EXTRACTOR], nets[Part.CLASSIFIER], data, params, ctx, penalty, average)
        return local_result(nets, shared, data, loss, label_counts, average)

    return local_round
