"""Fit an extractor to the mean outputs of a cohort on its probes, before a round or before the downloaded model is used."""

from __future__ import annotations

import math

import torch
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.networks.own_backbone import with_features
from fedcg.learning.probes.images import probe_images
from fedcg.learning.training.optimisers import adam

_MOST_KINDS = 100


def probe_inputs(ctx: RoundContext, count: int) -> torch.Tensor:
    """The cohort's probes as the extractor takes them, on the context's device; a frozen backbone's features where they stand for images."""
    assert ctx.masking.cohort is not None  # methods with probes need the secret
    images = probe_images(ctx.masking.cohort, count, ctx.spec.image)
    unlabelled = ImageSet(images, torch.zeros(count, dtype=torch.int64), ctx.spec.classes)
    (made,) = with_features(ctx.spec, [unlabelled], ctx.device)
    return normalise(made.images.to(ctx.device), ctx.spec.image)


@torch.no_grad()
def outputs_on(extractor: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """[M, D] float32 on the CPU; `extractor` is left in evaluation mode."""
    features: torch.Tensor = extractor.eval()(inputs)
    return features.flatten(1).float().cpu()


def residual(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean squared difference, in variances of what is wanted: 1 for the best constant of each feature."""
    spread = (wanted - wanted.mean(0)).square().mean().clamp(min=1e-8)
    return (outputs - wanted).square().mean() / spread


def distance(own: torch.Tensor, mean: torch.Tensor) -> float:
    """Of a mean from the own outputs [M, D]: the squared difference in variances of the one that varies more.

    Backbones of different kinds have a mean that varies less than each of them: n of them have an n-th. One that hardly varies is of no
    extractors: infinitely far away.
    """
    of_own, of_mean = (float((some - some.mean(0)).square().mean()) for some in (own, mean))
    if of_mean < of_own / _MOST_KINDS:
        return math.inf
    return float((own - mean).square().mean()) / max(of_own, of_mean, 1e-8)


def fit(
    extractor: nn.Module,
    inputs: torch.Tensor,
    wanted: torch.Tensor,
    steps: int,
    lr: float,
    until: float,
    ctx: RoundContext,
) -> tuple[float, float]:
    """Adam on the residual, all probes at once, batch norm's statistics as they are; until `until`, at most `steps` steps.

    Returns:
        The residual before and after.
    """
    extractor.eval()
    wanted = wanted.to(ctx.device)
    optimiser = adam([one for one in extractor.parameters() if one.requires_grad], lr, 0.0)
    first = found = float("nan")
    for done in range(steps + 1):
        loss = residual(extractor(inputs).flatten(1), wanted)
        found = float(loss.detach())
        first = found if done == 0 else first
        if not found > until or done == steps:  # a loss that is not a number ends it, too
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        ctx.callbacks.progress("align", done + 1, steps)
    return first, found
