"""Classifiers from the cohort's moments: calibrated on virtual features, or linear discriminant analysis in closed form.

Calibration: CCVR (Luo et al., NeurIPS 2021). Deviations: one covariance for all classes instead of one each, which
needs a C-th of the numbers and performs as well; features are clamped to their range, as extractors end in a ReLU or a
sigmoid; classes are drawn uniformly instead of by size.

A head by discriminant analysis has logits (μ_yᵀ Σ⁻¹ h - μ_yᵀ Σ⁻¹ μ_y / 2) / T + log p(y), with features and means
centred on the mean feature. Σ is shrunk towards a multiple of the identity (Ledoit & Wolf 2004): (1 - s) Σ + s tr(Σ) /
D · I. Features are not Gaussian, and with hundreds of dimensions the first term is overconfident. T, which is not in
the textbook, restores the weight of the prior.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from fedcg.learning.heads.moments import ClassGaussians, feature_bounds
from fedcg.learning.method import RoundContext, Weights, check_finite
from fedcg.learning.networks import feature_shape, load_part, weights_of
from fedcg.learning.networks.assembly import skeleton
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.spec import NetworkSpec
from fedcg.learning.training.losses import cross_entropy
from fedcg.learning.training.optimisers import adam
from fedcg.wire.parts import Part

STEPS, BATCH, RATE = 400, 64, 3e-4
TEMPERATURES = tuple(2.0 ** (step / 2) for step in range(9))
USUAL_TEMPERATURE = 4.0
_NEVER = -1000.0
"""The logit of a class that no client has, so that it is never predicted."""


def calibrated(head: Weights, classes: ClassGaussians, lr: float, ctx: RoundContext) -> dict[str, torch.Tensor]:
    """The classifier after Adam steps on features drawn from the classes, with a learning rate that decays to 0.

    Features are drawn from the cohort's secret, equal on all devices. The last digits can differ between processors.

    Args:
        head: the averaged classifier's weights.
        classes: of the cohort's features.
        lr: the cohort's learning rate, an upper bound here: a head that is ahead of a pretrained extractor keeps it
            from learning.
        ctx: spec, device, round, cohort.

    Raises:
        DivergedError: the result is not finite.
    """
    assert ctx.cohort.streams is not None  # calibrating methods require the secret
    streams = ctx.cohort.streams.at(ctx.round, "calibrate")
    asked, noise = streams.generator("classes"), streams.generator("noise")
    classifier = load_part(ctx.spec, Part.CLASSIFIER, head, ctx.device).train()
    rate = min(RATE, lr)
    optimiser = adam(classifier.parameters(), rate, 0.0)
    root = (classes.vectors * classes.values.sqrt()).T.float().to(ctx.device)  # Σ = rootᵀ root
    means, present = classes.means.float().to(ctx.device), classes.present
    bounds, shape = feature_bounds(ctx.spec), feature_shape(ctx.spec)
    for step in range(STEPS):
        labels = present[torch.randint(len(present), (BATCH,), generator=asked)].to(ctx.device)
        drawn = torch.randn(BATCH, len(root), generator=noise).to(ctx.device)
        features = (means[labels] + drawn @ root).clamp(*bounds)
        loss = cross_entropy(classifier(features.view(-1, *shape)), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = rate * (1.0 - step / STEPS)
        optimiser.step()
        ctx.callbacks.progress("calibrate", step + 1, STEPS)
    found = weights_of(classifier)
    check_finite({Part.CLASSIFIER: found}, "after the calibration")
    return found


_WITHOUT_WEIGHTS = {nn.Sequential, nn.Flatten, nn.Identity, nn.Dropout}


def linear_layer(spec: NetworkSpec) -> str:
    """The tensor prefix of a classifier that is one linear layer with bias over all features; empty for other classifiers."""
    with lent_generators(0):
        named = dict(skeleton(spec, Part.CLASSIFIER).named_modules())
    layers = [(name, one) for name, one in named.items() if type(one) not in _WITHOUT_WEIGHTS]
    name, layer = layers[0] if len(layers) == 1 else ("", None)
    is_one = isinstance(layer, nn.Linear) and layer.in_features == math.prod(feature_shape(spec))
    return f"{name}." if is_one and layer is not None and layer.bias is not None else ""


def lda_head(
    classes: ClassGaussians, log_prior: torch.Tensor, shrinkage: float, temperature: float, layer: str
) -> dict[str, torch.Tensor]:
    """The LDA head for classes with Gaussian features.

    Args:
        classes: of the cohort's features.
        log_prior: log p(y) at the place of use, [C].
        shrinkage: s, from 0 to 1.
        temperature: divides the logits of the features before the prior is added.
        layer: prefix of the tensor names (`linear_layer`).

    Returns:
        `weight` [C, D] and `bias` [C], float32.
    """
    centre = classes.shares @ classes.means
    about = classes.means - centre
    shrunk = (1.0 - shrinkage) * classes.values + shrinkage * classes.values.mean()
    weight = about @ classes.vectors / shrunk.clamp(min=1e-12) @ classes.vectors.T / temperature
    bias = log_prior.double() - 0.5 * (weight * about).sum(1) - weight @ centre
    known = classes.shares > 0
    weight = torch.where(known[:, None], weight, torch.zeros_like(weight))
    bias = torch.where(known, bias, torch.full_like(bias, _NEVER))
    return {f"{layer}weight": weight.float(), f"{layer}bias": bias.float()}


def chosen_head(
    classes: ClassGaussians,
    log_prior: torch.Tensor,
    shrinkage: float,
    layer: str,
    loss_of: Callable[[Weights], float] | None,
) -> dict[str, torch.Tensor]:
    """`lda_head` with the temperature of least loss; with the usual one if `loss_of` is None."""
    if loss_of is None:
        return lda_head(classes, log_prior, shrinkage, USUAL_TEMPERATURE, layer)
    return min((lda_head(classes, log_prior, shrinkage, one, layer) for one in TEMPERATURES), key=loss_of)
