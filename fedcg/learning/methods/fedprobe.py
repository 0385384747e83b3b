"""fedprobe: FedSplit whose private extractors are kept alike by a mean of their outputs on probe images (our own method).

The cohort's secret makes images without anybody's data in them, the same on all devices and unknown to the coordinator
(`probes.images`). A client shares its classifier and its outputs on them, the server the mean of both; before it trains, and before it
uses what it downloaded, a client fits its extractor to the mean outputs (`probes.alignment`). So the averaged classifier meets features
like those that it was learned from, and each extractor takes from the others what their images taught them, as in FedAvg, though no
extractor leaves its box.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field

from fedcg.learning import probes
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    ClientState,
    DivergedError,
    LabelCounts,
    LocalResult,
    Method,
    Needs,
    Payload,
    Personal,
    RoundContext,
    ServerState,
    Spill,
    Weights,
)
from fedcg.learning.methods._averaging import LocalHalf, average_of, unpenalised, with_statistics
from fedcg.learning.networks import load_part, weights_of
from fedcg.wire.parts import Part

HEAD = frozenset({Part.CLASSIFIER})
SHARED = HEAD | {Part.STATISTICS}
_MOST_CUT = 0.01
"""Share of outputs that may lie outside what can be told; a few outliers move no mean far."""


class FedprobeParams(probes.ProbeParams):
    """Training, the probes, and how extractors are fitted to them."""

    align_steps: int = Field(
        default=300,
        ge=1,
        description="steps of the fit to the mean outputs, at most; 1000, with align_lr = 0.001, from eight clients on and where labels are skewed",
    )
    align_lr: float = Field(default=3e-4, gt=0, description="learning rate of that fit")
    align_until: float = Field(
        default=0.005, ge=0, description="end it at this residual, in variances of the mean outputs"
    )
    trust: float = Field(
        default=4.0,
        gt=0,
        description="how far from the own outputs the mean is believed, in variances; beyond, the round does without",
    )


HALF = LocalHalf(FedprobeParams, HEAD, unpenalised, LabelCounts.NEVER)


def align(own: Mapping[Part, Weights], aggregate: Aggregate, ctx: RoundContext) -> Mapping[Part, Weights]:
    """The client's extractor, fitted to the mean outputs; nothing where there are none, or none to be believed."""
    params = FedprobeParams.model_validate(ctx.spec.params)
    try:
        mean = probes.mean_outputs(aggregate.parts[Part.STATISTICS], params)
    except DivergedError as error:  # one client's numbers must not end everybody's round
        ctx.callbacks.warn(f"{error}: it is not believed, and this round does without probes")
        return {}
    if mean is None:
        return {}
    extractor = load_part(ctx.spec, Part.EXTRACTOR, own[Part.EXTRACTOR], ctx.device)
    inputs = probes.probe_inputs(ctx, params.probes)
    away = probes.distance(probes.outputs_on(extractor, inputs), mean)
    if not away <= params.trust:
        ctx.callbacks.warn(
            f"the mean of outputs on the probes is not believed: it is {away:.3g} variances away from this device's own "
            f"(trust: {params.trust:g}); this round does without probes"
        )
        return {}
    before, after = probes.fit(extractor, inputs, mean, params.align_steps, params.align_lr, params.align_until, ctx)
    if not (after <= before and math.isfinite(after)):
        ctx.callbacks.warn(
            f"the extractor can't be fitted to the mean of outputs on the probes: its residual went from {before:.3g} to {after:.3g}; "
            "this round does without probes"
        )
        return {}
    return {Part.EXTRACTOR: weights_of(extractor)}


def local_round(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
    """Fit the extractor to the mean outputs, train as FedSplit does, then tell the outputs of what came of it."""
    params = FedprobeParams.model_validate(ctx.spec.params)
    own = dict(state.parts) if aggregate is None else {**state.parts, **align(state.parts, aggregate, ctx)}
    trained = {part: own[part] for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    down = None if aggregate is None else replace(aggregate, parts={part: aggregate.parts[part] for part in HEAD})
    result = HALF.round_of(ClientState(trained), data, down, ctx)
    extractor = load_part(ctx.spec, Part.EXTRACTOR, result.private.parts[Part.EXTRACTOR], ctx.device)
    outputs = probes.outputs_on(extractor, probes.probe_inputs(ctx, params.probes))
    _warn_of_cut(outputs, params.clip, ctx)
    return with_statistics(result, probes.counted(outputs, ctx.masking.sum_weight or len(data), params))


def _warn_of_cut(outputs: torch.Tensor, clip: float, ctx: RoundContext) -> None:
    """Warn where many outputs [M, D] are cut to [0, clip] as they are told: their mean is another then."""
    share = float(((outputs < 0.0) | (outputs > clip)).float().mean())
    if share > _MOST_CUT:
        ctx.callbacks.warn(
            f"{share:.1%} of the outputs on the probes lie outside [0, {clip:g}] (lowest {float(outputs.min()):.3g}, highest "
            f"{float(outputs.max()):.3g}) and are cut to it, which biases their mean: plan with a higher clip (--set clip=N), or "
            "where they are negative with a network whose extractor ends in a ReLU"
        )


def aggregator(state: ServerState, ctx: RoundContext, spill: Spill) -> Aggregator:
    """The average of the classifiers, and the sums of outputs."""
    params = FedprobeParams.model_validate(ctx.spec.params)
    return probes.WithProbeSums(
        average_of(FedprobeParams, HEAD, state, ctx, spill), params, ctx.masking.unmasking, ctx.callbacks.warn
    )


METHOD = Method(
    name="fedprobe",
    title="classifiers averaged, private extractors aligned by the mean of their outputs on a cohort's probe images",
    params_type=FedprobeParams,
    payload=Payload(SHARED, SHARED, frozenset({Part.EXTRACTOR}), HEAD, probes.sums_layout, is_summed=True),
    needs=Needs(cohort=True),
    personal=Personal(align=align),
    local_round=local_round,
    aggregator=aggregator,
    private_stages=1,
)
