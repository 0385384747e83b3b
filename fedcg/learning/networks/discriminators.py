"""Conditional discriminators: (features, label) -> one logit; D = sigmoid(logit) tends to 1 on real features.

FedCG writes D(h) without the label, but calls the pair a conditional GAN; read as conditional: the label's learned
embedding joins the features. Every layer with weights is spectrally normalised (as in the authors' code). No batch norm
here, also where the published one may have it: real and generated rows go through in ONE forward pass and must not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.networks.generators import spread_growth
from fedcg.learning.networks.spectral import SpectralConv2d, SpectralLinear

DiscriminatorBuilder = Callable[[tuple[int, ...], int], nn.Module]
_WIDTHS = (128, 256, 512)
_HIDDEN = 256


class ConvDiscriminator(nn.Module):
    """Mirror of the published generator: the label embedding is C constant maps beside the features, then 128-256-512-1."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.shape = shape
        self.embedding = nn.Embedding(classes, classes)
        kernels = list(zip(spread_growth(height, 4)[::-1], spread_growth(width, 4)[::-1], strict=True))
        layers: list[nn.Module] = []
        before = channels + classes
        for after, kernel in zip(_WIDTHS, kernels[:3], strict=True):
            layers += [SpectralConv2d(before, after, kernel), nn.LeakyReLU(0.2)]
            before = after
        layers += [SpectralConv2d(before, 1, kernels[3]), nn.Flatten(0)]
        self.body = nn.Sequential(*layers)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits."""
        maps = features.view(-1, *self.shape)
        condition = self.embedding(labels)[:, :, None, None].expand(-1, -1, *self.shape[1:])
        logits: torch.Tensor = self.body(torch.cat([maps, condition], dim=1))
        return logits


class MlpDiscriminator(nn.Module):
    """(features + label embedding) - 256 - 1."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, classes)
        self.body = nn.Sequential(
            SpectralLinear(width + classes, _HIDDEN),
            nn.LeakyReLU(0.2),
            SpectralLinear(_HIDDEN, 1),
            nn.Flatten(0),
        )

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits."""
        logits: torch.Tensor = self.body(torch.cat([features.flatten(1), self.embedding(labels)], dim=1))
        return logits


def _conv(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
    return ConvDiscriminator((channels, height, width), classes)


def _mlp(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return MlpDiscriminator(math.prod(feature_shape), classes)


DISCRIMINATORS: Mapping[str, DiscriminatorBuilder] = {"conv": _conv, "mlp": _mlp}
