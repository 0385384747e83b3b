"""The gradient of one batch at the round's start, as a server would see it, and what it reveals without a search.

Gradients are written by the truth's side and read by attacks. A real update of many epochs is a sum of such gradients along a path;
`weight_difference` is what it comes to.

A gradient shows its labels, and of a single image the exact input of the first linear layer: that layer computes W h + b, so that
∂L/∂W = δ hᵀ and ∂L/∂b = δ: their quotient is h (Geiping 2020, proposition 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from audit.evidence import Extractor, View, WholeModel, networks
from fedcg.learning.method import Weights
from fedcg.learning.networks import build_part, feature_shape
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

_TINY = 1e-12
Gradients = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of the mean cross-entropy of one batch, of the parts that the method sends.

    Attributes:
        parts: the parts, in this order; `values`: gradients in the order of their parameters.
        rows: images in the batch.
    """

    parts: tuple[Part, ...]
    values: Gradients
    rows: int


def parameters_of(model: WholeModel, parts: Sequence[Part]) -> list[nn.Parameter]:
    """The parameters that a gradient is of, in its order."""
    nets = {Part.EXTRACTOR: model.extractor, Part.CLASSIFIER: model.classifier}
    return [parameter for part in parts for parameter in nets[part].parameters()]


def gradient(
    model: WholeModel, pixels: torch.Tensor, labels: torch.Tensor, parts: Sequence[Part], *, create_graph: bool = False
) -> Gradients:
    """∇θ of the mean cross-entropy (FedCG eq. 7's ∇L_cls).

    Args:
        model: it.
        pixels: [N, C, H, W] in [0, 1].
        labels: [N] int64, or [N, classes] probabilities.
        parts: θ: extractor and classifier for a whole model (FedAvg), the classifier alone (FedSplit, FedCG).
        create_graph: whether it is to be differentiated again.
    """
    loss = nn.functional.cross_entropy(model.logits(pixels), labels)
    return torch.autograd.grad(loss, parameters_of(model, parts), create_graph=create_graph)


def batch_gradient(
    spec: FederationSpec,
    model: Mapping[Part, Weights],
    pixels: torch.Tensor,
    labels: torch.Tensor,
    parts: Sequence[Part],
) -> BatchGradient:
    """What the device would send of a batch after one step, with its true model."""
    true = networks.whole_model(spec, model[Part.EXTRACTOR], model[Part.CLASSIFIER])
    found = gradient(true, pixels, labels, parts)
    return BatchGradient(tuple(parts), tuple(value.detach() for value in found), len(labels))


def with_noise(seen: BatchGradient, deviation: float, stream: torch.Generator) -> BatchGradient:
    """The same with Gaussian noise on every number (FedCG table 2's FedAvg with noise)."""
    values = tuple(value + deviation * torch.randn(value.shape, generator=stream) for value in seen.values)
    return BatchGradient(seen.parts, values, seen.rows)


def weight_difference(before: Weights, after: Weights) -> dict[str, torch.Tensor]:
    """After - before of every floating tensor, by name: what many steps came to."""
    return {name: after[name] - before[name] for name in before if before[name].is_floating_point()}


def attacker_model(view: View, source: Extractor, streams: Streams, epochs: int) -> WholeModel:
    """The model of an attacker who observes gradients at the round's start: the aggregate's classifier behind an extractor.

    Args:
        view: what the attacker has; `SENT` takes the extractor of the aggregate.
        source: where the extractor comes from.
        streams: for random weights.
        epochs: of a surrogate.
    """
    return networks.assembled(replace(view, update=view.before.parts), source, streams, epochs)


def lacks_closed_form(spec: FederationSpec) -> str | None:
    """Why labels and features do not follow from a gradient; None where they do."""
    linear = [layer for layer in build_part(spec, Part.CLASSIFIER).modules() if isinstance(layer, nn.Linear)]
    if linear and all(layer.bias is not None for layer in linear):
        return None
    return f"the classifier of {spec.network.split} has no linear layers with a bias, whose gradients show labels and features"


def revealed_labels(seen: BatchGradient) -> torch.Tensor:
    """The labels of a batch, [rows] int64, from the gradient of the last bias (iDLG: Zhao 2020, eq. 3-4).

    That gradient is the mean of softmax - onehot: of one image only the label's number is negative. Of a batch each image in
    turn takes the smallest number, to which its share 1/rows is added back.
    """
    left, found = seen.values[-1].clone(), []
    for _ in range(seen.rows):
        found.append(int(left.argmin()))
        left[found[-1]] += 1 / seen.rows
    return torch.tensor(found)


def linear_inputs(model: WholeModel, pixels: torch.Tensor) -> torch.Tensor:
    """What enters the classifier's first linear layer, [N, D]; of LeNet5 the extractor's features themselves."""
    caught: list[torch.Tensor] = []
    hook = _first_linear(model).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].flatten(1)))
    try:
        model.logits(pixels)
    finally:
        hook.remove()
    return caught[0]


def standardised(features: torch.Tensor, spec: FederationSpec) -> torch.Tensor:
    """Inputs of the first linear layer [N, D] with each map of each image at mean 0 and deviation 1; without maps each image as a whole.

    What is left is where a map is bright, which two extractors of one start have in common; levels and spreads are not.
    """
    shape = feature_shape(spec)
    maps = shape[0] if math.prod(shape) == features.shape[1] > shape[0] else 1
    split = features.unflatten(1, (maps, -1))
    spread = split.var(dim=2, keepdim=True, unbiased=False) + _TINY
    level = split.mean(dim=2, keepdim=True)
    result: torch.Tensor = ((split - level) / spread.sqrt()).flatten(1)
    return result


def revealed_features(model: WholeModel, seen: BatchGradient) -> torch.Tensor:
    """The input [D] of the first linear layer for a single image: h = (∂L/∂W)ᵀ δ / |δ|², δ = ∂L/∂b.

    Args:
        model: any model of the federation: only its form matters.
        seen: of a batch of one.
    """
    weight = _first_linear(model).weight
    at = next(at for at, one in enumerate(parameters_of(model, seen.parts)) if one is weight)
    slope, delta = seen.values[at], seen.values[at + 1]
    return slope.T @ delta / delta.square().sum()


def _first_linear(model: WholeModel) -> nn.Linear:
    return next(layer for layer in model.classifier.modules() if isinstance(layer, nn.Linear))
