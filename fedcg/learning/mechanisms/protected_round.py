"""One client's local round with its privacy mechanisms; called by agents and simulations.

Mechanisms that work inside a local step (`gradient_noise`, `dropout`, `dp_sgd`) are applied by the training loops,
which read them from the round's context. Everything before and after the steps is applied here.

`balance` keeps a client's label distribution out of the classifier that it sends, against label inference. The last
bias of a classifier trained on unbalanced labels encodes their shares, and so do the weights before it.

`logits` is logit adjustment (Menon et al., 2021, eq. 10): cross-entropy of logits + log p_i(y), with p_i the client's
label shares. The logits themselves then need not encode p_i. It only changes the bias, because C(h) + log p_i(y) is the
same classifier with another last bias. The round starts from the aggregate's classifier with log p_i added to its last
bias and trains as usual. log p_i is then subtracted from the copy that is sent. The private copy keeps it, so the
evaluated and exported model fits the client's own labels. If a method applies the classifier to more than the client's
images (replayed features, a generator), the adjustment applies there too. Methods that keep the classifier private are
not changed.

`bias` is plain removal: the last bias is sent unchanged, as in the aggregate.

A finished update is clipped, noised and pruned, in this order. These act on its difference to the round's starting
aggregate. Batch norm's counters are always sent as 0, since they count a client's images. Label counts get separate
noise. Noise comes from explicit generators, in the order of parts and names.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fedcg.learning.errors import ExtensionError, PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import check_dp_sgd
from fedcg.learning.method import Aggregate, ClientState, LocalResult, Method, Parts, RoundContext, SharedResult
from fedcg.learning.networks.assembly import skeleton
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.spec import TRAINER, NetworkSpec
from fedcg.wire.parts import Part, Report


def reduced_update(parts: Parts, base: Parts, privacy: PrivacySettings, stream: torch.Generator) -> Parts:
    """The update as it may leave the device.

    Args:
        parts: shared parts after the local round.
        base: the same parts of the round's starting aggregate.
        privacy: `update_clip`, `update_noise` and `prune`; if all are off, `parts` is returned unchanged.
        stream: of the noise.
    """
    if not privacy.reduces_update:
        return parts
    differences = {
        (part, name): parts[part][name] - base[part][name]
        for part in sorted(parts)
        for name in sorted(parts[part])
        if parts[part][name].is_floating_point()
    }
    factor = 1.0
    if privacy.update_clip is not None:
        norm = float(torch.stack([one.double().square().sum() for one in differences.values()]).sum().sqrt())
        factor = min(1.0, privacy.update_clip / norm) if norm else 1.0
    reduced = {part: dict(weights) for part, weights in parts.items()}
    for (part, name), difference in differences.items():
        changed = difference * factor
        if privacy.update_noise:
            changed = changed + privacy.update_noise * torch.randn(changed.shape, generator=stream)
        tensor = base[part][name] + pruned(changed, privacy.prune)
        # Batch norm takes its square root, so noise must not make it negative.
        reduced[part][name] = tensor.clamp(min=0.0) if name.endswith("running_var") else tensor
    return reduced


def pruned(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """The tensor with its floor(share · numbers) smallest magnitudes set to 0 (gradient compression, DLG §5)."""
    count = int(share * tensor.numel())
    if not count:
        return tensor
    smallest = tensor.abs().flatten().topk(count, largest=False, sorted=False).indices
    kept = tensor.flatten().clone()
    kept[smallest] = 0.0
    return kept.view(tensor.shape)


def noisy_counts(report: Report, scale: float, stream: torch.Generator) -> Report:
    """The report with discrete Laplace noise on label counts, P(k) ~ exp(-|k| / scale), cut at 0; `examples` is their sum.

    Adding or removing one image changes one count by 1, so the counts alone have ε = 1 / scale. A report without label
    counts is not changed. If all counts become 0, one random class is set to 1, because an update needs an example.
    """
    if report.label_counts is None or not scale:
        return report
    classes = len(report.label_counts)
    # The floor of an exponential variable is geometric; the difference of two of them is discrete Laplace.
    draws = torch.empty(2, classes, dtype=torch.float64).exponential_(generator=stream).mul_(scale).floor_().long()
    counts = (torch.tensor(report.label_counts) + draws[0] - draws[1]).clamp(min=0)
    if not int(counts.sum()):
        counts[int(torch.randint(classes, (), generator=stream))] = 1
    values = tuple(int(count) for count in counts)
    return report.model_copy(update={"label_counts": values, "examples": sum(values)})


def log_prior(label_counts: Sequence[int]) -> torch.Tensor:
    """The client's log p_i(y), [C] float32, with one image added to each class so that no class is impossible."""
    counts = torch.tensor(label_counts, dtype=torch.float64) + 1.0
    return (counts / counts.sum()).log().float()


def last_bias(spec: NetworkSpec) -> str:
    """Name of the classifier's tensor that is added to the logits.

    Raises:
        PrivacyError: the classifier does not end in a linear layer with a bias.
    """
    with lent_generators(0):
        leaves = [
            (name, layer)
            for name, layer in skeleton(spec, Part.CLASSIFIER).named_modules()
            if not list(layer.children())
        ]
    name, layer = leaves[-1]
    if not isinstance(layer, nn.Linear) or layer.bias is None or layer.out_features != len(spec.classes):
        raise PrivacyError(
            f"balance needs a classifier that ends in a linear layer with a bias; the one of network.split = "
            f"{spec.network.split} ends in {type(layer).__name__}: choose another split, or leave balance out"
        )
    return f"{name}.bias" if name else "bias"


def check_mechanisms(spec: NetworkSpec, method: Method, privacy: PrivacySettings) -> None:
    """Check that a client can train under a spec or plan with its mechanisms.

    Raises:
        PrivacyError: names the setting to change.
    """
    inside = {name: getattr(privacy, name) for name in ("dp_sgd", "gradient_noise", "dropout", "label_counts_noise")}
    if spec.network.split == TRAINER and any(inside.values()):
        names = [name for name, value in inside.items() if value]
        raise PrivacyError(
            f"{', '.join(names)}: not supported with a Trainer, which runs its own steps; update_clip, update_noise and prune are supported"
        )
    if privacy.dp_sgd is not None:
        check_dp_sgd(spec, method)
    if (privacy.reduces_update or privacy.balance == "bias") and Part.STATISTICS in method.payload.sealed:
        raise PrivacyError(
            f"update_clip, update_noise and prune would distort the statistics of method {method.name}, and balance = bias its calibrated "
            "classifier: leave them out; balance = logits is supported"
        )
    if privacy.balance != "none" and Part.CLASSIFIER in method.payload.up and spec.network.split != TRAINER:
        last_bias(spec)


def protected_round(
    method: Method, state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext
) -> LocalResult:
    """`method.local_round` with the mechanisms of `ctx.privacy`, if there are any.

    CUDA graphs are disabled if each step draws its own noise.

    Raises:
        PrivacyError: a mechanism that this method or its networks do not support.
        ExtensionError: the method returns other parts or tensors than its payload names.
        DivergedError, DataError: as of `local_round`.
    """
    privacy = ctx.privacy
    start = None if aggregate is None else replace(aggregate, parts=downloaded_parts(state.parts, aggregate, data, ctx))
    if not privacy.is_on:
        return _as_promised(method.local_round(state, data, start, ctx), method, ctx)
    check_mechanisms(ctx.spec, method, privacy)
    if privacy.dp_sgd is not None or privacy.gradient_noise:
        ctx = replace(ctx, machine=replace(ctx.machine, graphs=False))
    result = _as_promised(method.local_round(state, data, start, ctx), method, ctx)
    base = {**state.parts, **({} if aggregate is None else aggregate.parts)}
    return _protected(result, {part: base[part] for part in result.shared.parts}, data, ctx)


def _as_promised(result: LocalResult, method: Method, ctx: RoundContext) -> LocalResult:
    """Check a method's result against its payload here, because later checks can't name the cause, and reset batch norm's counters."""
    wanted, shared = ctx.spec.shared_in(ctx.round), result.shared.parts
    faults = [f"lacks {part.value}" for part in sorted(wanted - shared.keys())]
    faults += [
        f"has {part.value}, which is not in payload.up or not exchanged in this round"
        for part in sorted(shared.keys() - wanted)
    ]
    faults += [
        f"lacks {part.value} in its private half" for part in sorted(method.payload.parts - result.private.parts.keys())
    ]
    for part in sorted(shared.keys() & wanted):
        stated = {(one.name, one.shape) for one in ctx.spec.layouts[part]}
        found = {(name, tuple(tensor.shape)) for name, tensor in shared[part].items()}
        if found != stated:
            others, due = (
                ", ".join(f"{name} {[*shape]}" for name, shape in sorted(ones)[:3])
                for ones in (found - stated, stated - found)
            )
            faults.append(f"has in {part.value} {others or 'nothing'} instead of {due or 'nothing'}")
    if faults:
        raise ExtensionError(f"method {method.name}: the result of local_round {'; '.join(faults)}")
    return replace(result, shared=SharedResult(_without_counters(shared)))


def _without_counters(parts: Parts) -> Parts:
    """The parts with batch norm's counters of batches at 0: they have no effect and would tell how many images the client has."""
    return {
        part: {
            name: torch.zeros_like(one) if name.endswith("num_batches_tracked") else one
            for name, one in weights.items()
        }
        for part, weights in parts.items()
    }


def _with_bias(parts: Parts, bias: str, numbers: torch.Tensor) -> Parts:
    return {**parts, Part.CLASSIFIER: {**parts[Part.CLASSIFIER], bias: numbers}}


def _adjusted(parts: Parts, data: ImageSet, ctx: RoundContext, sign: int) -> Parts:
    """With `balance = logits`, add the client's log p_i(y) to the classifier's last bias, or subtract it."""
    if ctx.privacy.balance != "logits" or Part.CLASSIFIER not in parts:
        return parts
    bias = last_bias(ctx.spec)
    return _with_bias(parts, bias, parts[Part.CLASSIFIER][bias] + sign * log_prior(data.label_counts()))


def personal_parts(parts: Parts, data: ImageSet, ctx: RoundContext) -> Parts:
    """An aggregate's parts as this client trains or uses them: with `balance = logits`, fitted to its own labels."""
    return _adjusted(parts, data, ctx, 1)


def downloaded_parts(own: Parts, aggregate: Aggregate, data: ImageSet, ctx: RoundContext) -> Parts:
    """The client's parts `own` that a download changes: the aggregate's and those its method aligns; `ctx` is the next round's."""
    method = get_method(ctx.spec.method)
    aligned = {} if method.personal.align is None else method.personal.align(own, aggregate, data, ctx)
    return personal_parts({**aggregate.parts, **aligned}, data, ctx)


def neutral_parts(parts: Parts, data: ImageSet, ctx: RoundContext) -> Parts:
    """A client's own parts without the label fit of `personal_parts`."""
    is_shared = Part.CLASSIFIER in get_method(ctx.spec.method).payload.up
    return _adjusted(parts, data, ctx, -1) if is_shared else parts


def _protected(result: LocalResult, base: Parts, data: ImageSet, ctx: RoundContext) -> LocalResult:
    """The finished round as it may leave the client. The private half is not changed."""
    privacy, streams = ctx.privacy, ctx.streams.at("privacy")
    shared = neutral_parts(result.shared.parts, data, ctx)
    if privacy.balance == "bias" and Part.CLASSIFIER in shared:
        bias = last_bias(ctx.spec)
        shared = _with_bias(shared, bias, base[Part.CLASSIFIER][bias].clone())
    shared = _within_bounds(reduced_update(shared, base, privacy, streams.generator("update")), ctx)
    report = noisy_counts(result.report, privacy.label_counts_noise, streams.generator("label counts"))
    return LocalResult(SharedResult(shared), result.private, report)


def _within_bounds(parts: Parts, ctx: RoundContext) -> Parts:
    """Clamp numbers that noise moved beyond the bounds of their layout, which reveals nothing more."""
    bounds = {
        (part, layout.name): (layout.low, layout.high)
        for part in parts
        for layout in ctx.spec.layouts[part]
        if (layout.low, layout.high) != (None, None)
    }
    return {
        part: {
            # Clamping integers to float bounds would turn them into floats.
            name: one.clamp(*bounds[part, name]).to(one.dtype) if (part, name) in bounds else one
            for name, one in weights.items()
        }
        for part, weights in parts.items()
    }
