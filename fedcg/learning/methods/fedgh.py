"""FedGH (Yi et al., 2023): clients send class prototypes, the server trains one head on them, and every client continues from that head.

The clients' extractors may differ if their features have the same shape. Reading: all prototypes of a round have equal
weight, each as one row with its class as label.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from pydantic import Field

from fedcg.learning import method as fl
from fedcg.learning.aggregation import prototypes
from fedcg.learning.aggregation.distillation import Distillation, distillation
from fedcg.learning.image_set import ImageSet
from fedcg.learning.methods._averaging import PERSONAL, local_result
from fedcg.learning.networks import feature_shape, load_part, weights_of
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import cross_entropy
from fedcg.learning.training.stage import Nets, Tensors, moving_average, run_stage
from fedcg.wire.parts import Part


class FedGhParams(fl.TrainingParams):
    """Parameters of local training and of the server's training of the head."""

    server_steps: int = Field(default=100, ge=1, description="steps of the head, each on all prototypes of a round")
    server_lr: float = Field(default=1e-3, gt=0, description="learning rate of the head on the server")


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Start from the global head, train it with the client's extractor, and send the trained extractor's prototypes."""
    params, data = FedGhParams.model_validate(ctx.spec.params), data.to(ctx.device)
    weights = {**state.parts, **(aggregate.parts if aggregate else {})}
    nets = {part: load_part(ctx.spec, part, weights[part], ctx.device) for part in sorted(PERSONAL)}
    average = moving_average(nets, params)
    loss = train_classifier(nets[Part.EXTRACTOR], nets[Part.CLASSIFIER], data, params, ctx, after=average)
    result = local_result(nets, frozenset(), data, loss, fl.LabelCounts.NEVER, average)
    ours = prototypes.prototypes_of(nets[Part.EXTRACTOR], data, ctx.spec)
    kept = {**result.private.parts, Part.STATISTICS: {name: tensor.clone() for name, tensor in ours.items()}}
    return fl.LocalResult(fl.SharedResult({Part.STATISTICS: ours}), replace(result.private, parts=kept), result.report)


def trained_head(
    state: fl.ServerState, ctx: fl.RoundContext, updates: Mapping[str, Callable[[], fl.Update]]
) -> fl.Aggregate:
    """The head after its training on all prototypes, in client-id order."""
    params = FedGhParams.model_validate(ctx.spec.params)
    found = [updates[client]().parts[Part.STATISTICS] for client in sorted(updates)]
    rows = torch.cat([ours[prototypes.PROTOTYPES][ours[prototypes.HELD].bool()] for ours in found]).to(ctx.device)
    labels = torch.cat([ours[prototypes.HELD].nonzero().flatten() for ours in found]).to(ctx.device)
    head = load_part(ctx.spec, Part.CLASSIFIER, state.aggregate.parts[Part.CLASSIFIER], ctx.device)
    features = rows.view(-1, *feature_shape(ctx.spec))

    def loss_of(nets: Nets, batch: Tensors) -> torch.Tensor:
        shown, classes = batch
        return cross_entropy(nets[Part.CLASSIFIER](shown), classes)

    settings = Distillation(params.server_steps, max(1, len(rows)), params.server_lr, params.weight_decay)
    every_row = (features, labels)
    run_stage(distillation({Part.CLASSIFIER: head}, loss_of, lambda _: every_row, settings, at_once=1), ctx)
    return fl.Aggregate({Part.CLASSIFIER: weights_of(head)})


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The server half of a round."""
    return prototypes.FinishOnlyAggregator(spill, partial(trained_head, state, ctx))


METHOD = fl.Method(
    name="fedgh",
    title="FedGH: a head trained on the server from class prototypes",
    params_type=FedGhParams,
    payload=fl.Payload(
        up=frozenset({Part.STATISTICS}),
        down=frozenset({Part.CLASSIFIER}),
        private=frozenset({Part.EXTRACTOR}),
        statistics=prototypes.prototype_layout,
    ),
    local_round=local_round,
    aggregator=aggregator,
)
