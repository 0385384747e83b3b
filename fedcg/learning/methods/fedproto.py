"""FedProto (Tan et al., 2022): only class prototypes are shared, and each client's features are pulled towards the global ones.

A model predicts the class of the nearest prototype (eq. 8). The classifier only helps to train the extractor and stays
private. Readings: the global prototype of a class is the mean over the clients that have it, weighted by their images
if all report their label counts (eq. 6 divides by the number of clients once more, which would shrink it); the distance
of eq. 7 is squared and a mean over features.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import nn

from fedcg.learning import method as fl
from fedcg.learning.aggregation.prototypes import (
    HELD,
    PROTOTYPES,
    FinishOnlyAggregator,
    filled,
    merged_prototypes,
    prototype_layout,
    prototypes_of,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.spec import NetworkSpec
from fedcg.learning.training.classification import Penalty, train_classifier
from fedcg.learning.training.stage import EXTRA, Nets, average_extras, moving_average
from fedcg.wire.parts import Part, Report

SHARED = frozenset({Part.STATISTICS})
PRIVATE = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})


class FedProtoParams(fl.TrainingParams):
    """Parameters of training and of the pull towards the global prototypes."""

    pull: float = Field(default=1.0, ge=0, description="weight of the squared distance to the global prototype (eq. 7)")


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Train towards the global prototypes, then compute the client's prototypes."""
    params = FedProtoParams.model_validate(ctx.spec.params)
    known = (aggregate.parts if aggregate else state.parts)[Part.STATISTICS]
    nets = {part: load_part(ctx.spec, part, state.parts[part], ctx.device) for part in sorted(PRIVATE)}
    extractor, data = nets[Part.EXTRACTOR], data.to(ctx.device)
    average = moving_average(nets, params, (Part.EXTRACTOR,))
    penalty = towards(known, params.pull, ctx.device)
    loss = train_classifier(extractor, nets[Part.CLASSIFIER], data, params, ctx, penalty, average)
    ours = prototypes_of(extractor, data, ctx.spec)
    kept = {part: weights_of(net) for part, net in nets.items()} | {Part.STATISTICS: filled(ours, known)}
    extras = average_extras(average)
    for one in average:
        extras[EXTRA + Part.STATISTICS.value] = filled(prototypes_of(one.means[Part.EXTRACTOR], data, ctx.spec), known)
    report = Report(examples=len(data), loss=loss, label_counts=data.label_counts())
    return fl.LocalResult(fl.SharedResult({Part.STATISTICS: ours}), fl.ClientState(kept, extras), report)


def towards(known: fl.Weights, weight: float, device: str) -> Penalty:
    """The penalty weight · mean over features of (h - prototype of y)², for images of classes that have one."""
    held, prototypes = known[HELD].to(device), known[PROTOTYPES].to(device)

    def loss(
        nets: Nets, features: torch.Tensor, logits: torch.Tensor, wanted: torch.Tensor, has: torch.Tensor
    ) -> torch.Tensor:
        return weight * (has * (features.flatten(1) - wanted).square().mean(1)).mean()

    return Penalty(loss, lambda images, labels: (prototypes[labels], held[labels].float()))


class NearestPrototype(nn.Module):
    """Images to logits: minus the mean squared distance of their features to each class's prototype."""

    prototypes: torch.Tensor
    held: torch.Tensor

    def __init__(self, extractor: nn.Module, statistics: fl.Weights) -> None:
        super().__init__()
        self.extractor = extractor
        self.register_buffer("prototypes", statistics[PROTOTYPES].clone())
        self.register_buffer("held", statistics[HELD].bool())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] float32, normalised, to [B, classes]; a class without a prototype ranks last."""
        features = self.extractor(images).flatten(1)
        logits = -(features[:, None] - self.prototypes).square().mean(2)
        return torch.where(self.held, logits, logits.amin(1, keepdim=True) - 1)


def predict(spec: NetworkSpec, parts: Mapping[Part, fl.Weights]) -> nn.Module:
    """The client's model."""
    return NearestPrototype(load_part(spec, Part.EXTRACTOR, parts[Part.EXTRACTOR]), parts[Part.STATISTICS])


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The server half of a round: the mean of the prototypes by class."""
    return FinishOnlyAggregator(spill, lambda updates: fl.Aggregate({Part.STATISTICS: merged_prototypes(updates)}))


METHOD = fl.Method(
    name="fedproto",
    title="FedProto: only class prototypes are shared; predicts the nearest one",
    params_type=FedProtoParams,
    payload=fl.Payload(SHARED, SHARED, PRIVATE, continued=frozenset(), statistics=prototype_layout),
    needs=fl.Needs(fl.LabelCounts.OPTIONAL),
    personal=fl.Personal(frozenset({Part.EXTRACTOR, Part.STATISTICS}), predict),
    local_round=local_round,
    aggregator=aggregator,
)
