"""One client's local round with its mechanisms around it: what agents and simulations call.

Mechanisms that work inside a local step (`gradient_noise`, `dropout`, `dp_sgd`) are done by the training loops, which find them in
the round's context; what comes before and after the steps is done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.balance import last_bias, log_prior, with_added, with_bias_of
from fedcg.learning.mechanisms.dp_sgd import check_dp_sgd
from fedcg.learning.mechanisms.finished_update import noisy_counts, reduced_update
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    LocalResult,
    Method,
    RoundContext,
    SharedResult,
    Weights,
)
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.spec import NetworkSpec
from fedcg.wire.parts import Part

Parts = Mapping[Part, Weights]


def check_mechanisms(spec: NetworkSpec, method: Method, privacy: PrivacySettings) -> None:
    """Check that a client can train under a spec or plan with its mechanisms.

    Raises:
        PrivacyError: names the setting to change.
    """
    if privacy.dp_sgd is not None:
        check_dp_sgd(spec, method)
    if privacy.balance != "none" and Part.CLASSIFIER in method.shared_up:
        last_bias(spec)


def protected_round(
    method: Method, state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext
) -> LocalResult:
    """`method.local_round`, with the mechanisms of `ctx.privacy`; without any, nothing else.

    Mixed precision and CUDA graphs are left out where each step draws noise of its own.

    Raises:
        PrivacyError: a mechanism that this method or its networks can't have.
        DivergedError, DataError: as of `local_round`.
    """
    privacy = ctx.privacy
    if not privacy.is_on:
        return method.local_round(state, data, aggregate, ctx)
    check_mechanisms(ctx.spec, method, privacy)
    if privacy.dp_sgd is not None or privacy.gradient_noise:
        ctx = replace(ctx, precision="f32", graphs=False)
    start = None if aggregate is None else replace(aggregate, parts=personal_parts(aggregate.parts, data, ctx))
    result = method.local_round(state, data, start, ctx)
    base = {**state.parts, **({} if aggregate is None else aggregate.parts)}
    return _protected(result, {part: base[part] for part in result.shared.parts}, data, ctx)


def personal_parts(parts: Parts, data: ImageSet, ctx: RoundContext) -> Parts:
    """An aggregate's parts as this client goes on from them, or uses them: with `balance = logits`, fitted to its own labels."""
    if ctx.privacy.balance != "logits" or Part.CLASSIFIER not in parts:
        return parts
    return with_added(parts, last_bias(ctx.spec), log_prior(data.label_counts()))


def downloaded_parts(own: Parts, aggregate: Aggregate, data: ImageSet, ctx: RoundContext) -> Parts:
    """What a download changes of a client's parts `own`: those of the aggregate, and what its method aligns to them."""
    method = get_method(ctx.spec.method)
    aligned = {} if method.align is None else method.align(own, aggregate, ctx)
    return {**personal_parts(aggregate.parts, data, ctx), **aligned}


def neutral_parts(parts: Parts, data: ImageSet, ctx: RoundContext) -> Parts:
    """A client's own parts without what `personal_parts` fitted to its labels."""
    shares = Part.CLASSIFIER in get_method(ctx.spec.method).shared_up
    if ctx.privacy.balance != "logits" or not shares or Part.CLASSIFIER not in parts:
        return parts
    return with_added(parts, last_bias(ctx.spec), -log_prior(data.label_counts()))


def _protected(result: LocalResult, base: Parts, data: ImageSet, ctx: RoundContext) -> LocalResult:
    """A finished round as it may leave the client; the private half stays as it is."""
    privacy, streams = ctx.privacy, ctx.streams.at("privacy")
    shared = neutral_parts(result.shared.parts, data, ctx)
    if privacy.balance == "bias" and Part.CLASSIFIER in shared:
        shared = with_bias_of(shared, last_bias(ctx.spec), base)
    shared = _within_bounds(reduced_update(shared, base, privacy, streams.generator("update")), ctx)
    report = noisy_counts(result.report, privacy.label_counts_noise, streams.generator("label counts"))
    return LocalResult(SharedResult(shared), result.private, report)


def _within_bounds(parts: Parts, ctx: RoundContext) -> Parts:
    """Noise may carry a number beyond the bounds of its layout: it is cut to them, which reveals nothing more."""
    bounds = {
        (part, layout.name): (layout.low, layout.high)
        for part in parts
        for layout in ctx.spec.layouts[part]
        if (layout.low, layout.high) != (None, None)
    }
    return {
        part: {
            # Integers clamped to bounds that are floats would become floats.
            name: one.clamp(*bounds[part, name]).to(one.dtype) if (part, name) in bounds else one
            for name, one in weights.items()
        }
        for part, weights in parts.items()
    }
