"""analytic: linear heads in closed form from one sealed sum of the cohort's features, exact under any data split.

Our own method, for extractors that need no training, such as a frozen public backbone. Clients send sealed moments of
their features: class counts, class sums and one second-moment matrix. Each solves linear discriminant analysis with its
own class shares as prior, and a temperature that its validation images choose. A projection behind the backbone is not
trained either: it passes the pooled features through, or mixes them at random if it is narrower.
"""

import torch
from pydantic import Field

from fedcg.learning import method as fl
from fedcg.learning.aggregation.prototypes import FinishOnlyAggregator
from fedcg.learning.data.image_folder import usable_rows
from fedcg.learning.heads.classifiers import chosen_head, linear_layer
from fedcg.learning.heads.moments import (
    CLIP,
    COUNTS,
    ClassGaussians,
    Clip,
    class_gaussians,
    feature_moments,
    moments_layout,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import log_prior
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, NetworkSpec
from fedcg.learning.training.batches import extract_features
from fedcg.learning.training.losses import cross_entropy
from fedcg.wire.parts import Part, Report

SHARED = frozenset({Part.STATISTICS})
PRIVATE = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})
_PROJECTION, _BIAS = "project.weight", "project.bias"


class AnalyticParams(fl.TrainingParams):
    """Parameters of the moments and the heads. The training parameters apply to the local-only models."""

    clip: Clip = CLIP
    shrinkage: float = Field(
        default=0.5, ge=0, le=1, description="shrinkage of the cohort's covariance, towards a multiple of the identity"
    )
    own_shrinkage: float = Field(
        default=0.9, ge=0, le=1, description="shrinkage of the covariance of a client's own, fewer images"
    )


def client_start(spec: FederationSpec, initial: fl.Parts) -> fl.ClientState:
    """The initial weights, with a projection that is equal on all clients and loses as little as possible."""
    extractor = dict(initial[Part.EXTRACTOR])
    if _PROJECTION in extractor:
        width, pooled = extractor[_PROJECTION].shape
        stream = Streams(spec_root(spec.seed)).at(spec.federation, "initial").generator("projection")
        mixed = torch.randn(width, pooled, generator=stream) / pooled**0.5
        extractor[_PROJECTION] = torch.eye(width, pooled) if width >= pooled else mixed
        extractor[_BIAS] = torch.zeros(width)
    return fl.ClientState({**initial, Part.EXTRACTOR: extractor})


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Compute the moments of the client's features and the head from them alone. Nothing is trained.

    Existing moments are not recomputed, because the sums of old and new ones would reveal what changed. They are 0
    before the first round, and after the owner has consented to new ones.
    """
    usable_rows(len(data), 2)
    moments = dict(state.parts[Part.STATISTICS])
    if not moments[COUNTS].any():
        extractor = load_part(ctx.spec, Part.EXTRACTOR, state.parts[Part.EXTRACTOR], ctx.device)
        moments = feature_moments(extractor, data, ctx)
    own = class_gaussians(moments)
    assert own is not None  # `usable_rows` has checked that there are images
    head = _head(own, state.parts, log_prior(data.label_counts()), _params(ctx).own_shrinkage, ctx)
    kept = {name: tensor.clone() for name, tensor in moments.items()}
    private = {**state.parts, Part.CLASSIFIER: head, Part.STATISTICS: kept}
    return fl.LocalResult(
        fl.SharedResult({Part.STATISTICS: moments}), fl.ClientState(private), Report(examples=len(data))
    )


def align(own: fl.Parts, aggregate: fl.Aggregate, data: ImageSet, ctx: fl.RoundContext) -> fl.Parts:
    """The head from the cohort's moments, with the client's own prior."""
    try:
        classes = class_gaussians(aggregate.parts[Part.STATISTICS]) if aggregate.parts else None
    except fl.DivergedError as error:
        ctx.callbacks.warn(f"{error}: this device keeps its own head")
        return {}
    if classes is None:
        return {}
    prior = log_prior(data.label_counts())
    head = _head(classes, own, prior, _params(ctx).shrinkage, ctx)
    if ctx.privacy.balance == "logits":  # the prior is then added to every downloaded classifier
        head[f"{linear_layer(ctx.spec)}bias"] -= prior
    return {Part.CLASSIFIER: head}


def _params(ctx: fl.RoundContext) -> AnalyticParams:
    return AnalyticParams.model_validate(ctx.spec.params)


def _head(
    classes: ClassGaussians, parts: fl.Parts, prior: torch.Tensor, shrinkage: float, ctx: fl.RoundContext
) -> dict[str, torch.Tensor]:
    layer, validation = linear_layer(ctx.spec), ctx.validation
    if validation is None or not len(validation):
        return chosen_head(classes, prior, shrinkage, layer, None)
    extractor = load_part(ctx.spec, Part.EXTRACTOR, parts[Part.EXTRACTOR], ctx.device)
    features = extract_features(extractor, validation.images.to(ctx.device), ctx.spec).flatten(1).cpu()

    def loss_of(head: fl.Weights) -> float:
        logits = features @ head[f"{layer}weight"].T + head[f"{layer}bias"]
        return float(cross_entropy(logits, validation.labels.cpu()))

    return chosen_head(classes, prior, shrinkage, layer, loss_of)


def _misfit(spec: NetworkSpec) -> str:
    if spec.network.backbones:
        return "all devices need the same features: leave network.backbones out"
    if not linear_layer(spec):
        return (
            f"it needs a linear classifier, and that of network.split = {spec.network.split} has several layers: choose a backbone "
            "with a projection, such as efficientnet_lite0+project:1280 with network.freeze = all"
        )
    return ""


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The server half of a round: updates hold nothing in the clear."""
    return FinishOnlyAggregator(spill, lambda _updates: fl.Aggregate({}))


METHOD = fl.Method(
    name="analytic",
    title="linear heads in closed form from one sealed sum of features, for a frozen backbone",
    params_type=AnalyticParams,
    payload=fl.Payload(SHARED, SHARED, PRIVATE, continued=frozenset(), statistics=moments_layout, sealed=SHARED),
    needs=fl.Needs(cohort=True, networks=_misfit),
    personal=fl.Personal(align=align),
    client_start=client_start,
    local_round=local_round,
    aggregator=aggregator,
    example=fl.Example(
        NetworkChoice(split="timm:test_efficientnet+project:8", noise_dim=8),
        ImageForm(mode="L", height=32, width=32, mean=(0.5,), std=(0.25,)),
    ),
)
