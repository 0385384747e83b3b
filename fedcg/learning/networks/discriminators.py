"""Conditional discriminators: (features, label) -> one logit; D = sigmoid(logit) tends to 1 on real features.

FedCG writes D(h) without the label, but calls the pair a conditional GAN and does not say how the label enters. Here it
enters by projection: logit = ψ(φ(h)) + <embedding(y), φ(h)>. Concatenated to the features, ten numbers beside 400 are
easily ignored, and the classifier then recognises few generated rows.
Every layer with weights on φ and ψ is spectrally normalised, as in the authors' code. No batch norm here, also where the
published one may have it: real and generated rows go through in ONE forward pass and must not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.networks.generators import empty_embedding, spread_growth
from fedcg.learning.networks.spectral import SpectralConv2d, SpectralLinear

DiscriminatorBuilder = Callable[[tuple[int, ...], int], nn.Module]
_WIDTHS = (128, 256, 512)
_HIDDEN = 256
_SLOPE = 0.2


class ProjectionDiscriminator(nn.Module):
    """ψ(φ(h)) + <embedding(y), φ(h)> over a body φ that ends in a vector."""

    def __init__(self, body: nn.Module, width: int, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = SpectralLinear(width, 1)
        self.embedding = empty_embedding(classes, width)
        self.input_shape = input_shape

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits."""
        inner: torch.Tensor = self.body(features.reshape(-1, *self.input_shape))
        logits: torch.Tensor = self.head(inner).squeeze(1) + (self.embedding(labels) * inner).sum(dim=1)
        return logits


def _conv(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Mirror of the published generator: convolutions 128-256-512 and a last one down to a single position."""
    channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
    kernels = list(zip(spread_growth(height, 4)[::-1], spread_growth(width, 4)[::-1], strict=True))
    layers: list[nn.Module] = []
    before = channels
    for after, kernel in zip((*_WIDTHS, _WIDTHS[-1]), kernels, strict=True):
        layers += [SpectralConv2d(before, after, kernel), nn.LeakyReLU(_SLOPE)]
        before = after
    return ProjectionDiscriminator(nn.Sequential(*layers, nn.Flatten()), before, (channels, height, width), classes)


def _mlp(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Features - 256 - 1."""
    width = math.prod(feature_shape)
    body = nn.Sequential(SpectralLinear(width, _HIDDEN), nn.LeakyReLU(_SLOPE))
    return ProjectionDiscriminator(body, _HIDDEN, (width,), classes)


DISCRIMINATORS: Mapping[str, DiscriminatorBuilder] = {"conv": _conv, "mlp": _mlp}
