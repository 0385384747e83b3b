"""What the gradient of one batch reveals without a search: its labels, and of a single image the exact input of the first linear layer.

That layer computes W h + b, so that ∂L/∂W = δ hᵀ and ∂L/∂b = δ: their quotient is h (Geiping 2020, proposition 3.1).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from audit.evidence.case import View
from audit.evidence.networks import Extractor, WholeModel, assembled
from audit.evidence.observed_gradient import BatchGradient, parameters_of
from fedcg.learning.networks import build_part, feature_shape
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

_TINY = 1e-12


def attacker_model(view: View, source: Extractor, streams: Streams, epochs: int) -> WholeModel:
    """The model of an attacker who observes gradients at the round's start: the aggregate's classifier behind an extractor.

    Args:
        view: what the attacker has; `SENT` takes the extractor of the aggregate.
        source: where the extractor comes from.
        streams: for random weights.
        epochs: of a surrogate.
    """
    return assembled(replace(view, update=view.before.parts), source, streams, epochs)


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
