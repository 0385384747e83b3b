"""What a server would see of single images or a batch: gradients at the round's start. Written by the truth's side, read by attacks.

A real update of many epochs is a sum of such gradients along a path; `weight_difference` is what it comes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from audit.evidence.networks import WholeModel, whole_model
from fedcg.learning.method import Weights
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

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
    networks = {Part.EXTRACTOR: model.extractor, Part.CLASSIFIER: model.classifier}
    return [parameter for part in parts for parameter in networks[part].parameters()]


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
    true = whole_model(spec, model[Part.EXTRACTOR], model[Part.CLASSIFIER])
    found = gradient(true, pixels, labels, parts)
    return BatchGradient(tuple(parts), tuple(value.detach() for value in found), len(labels))


def with_noise(seen: BatchGradient, deviation: float, stream: torch.Generator) -> BatchGradient:
    """The same with Gaussian noise on every number (FedCG table 2's FedAvg with noise)."""
    values = tuple(value + deviation * torch.randn(value.shape, generator=stream) for value in seen.values)
    return BatchGradient(seen.parts, values, seen.rows)


def weight_difference(before: Weights, after: Weights) -> dict[str, torch.Tensor]:
    """After - before of every floating tensor, by name: what many steps came to."""
    return {name: after[name] - before[name] for name in before if before[name].is_floating_point()}
