"""Conditional generators: (noise z, label y) -> features, for any feature shape.

The label enters as a learned C-dimensional embedding concatenated to the noise. The last activation follows the range of the
split's features: a sigmoid for features in (0, 1), a ReLU for features >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.networks.split import FeatureRange

GeneratorBuilder = Callable[[tuple[int, ...], int, int, FeatureRange], nn.Module]
_WIDTHS = (512, 256, 128)
_HIDDEN = 256


def empty_embedding(classes: int, width: int) -> nn.Embedding:
    """A trainable [C, width] label embedding without values yet.

    `nn.Embedding` would draw them, and a draw on the meta device makes torch import 800 modules (1.2 s).
    """
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(classes, width), freeze=False)
    return embedding


class ConditionalGenerator(nn.Module):
    """Embeds the label, concatenates it to the noise, and runs a body whose output is reshaped to the feature shape."""

    def __init__(
        self, body: nn.Module, input_shape: tuple[int, ...], feature_shape: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.embedding = empty_embedding(classes, classes)
        self.body = body
        self.input_shape = input_shape
        self.feature_shape = feature_shape

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Features for (z, y).

        Args:
            noise: [B, noise_dim] float32, z ~ N(0, I).
            labels: [B] int64.

        Returns:
            [B, *feature_shape] float32.
        """
        condition = torch.cat([noise, self.embedding(labels)], dim=1)
        features: torch.Tensor = self.body(condition.view(-1, *self.input_shape))
        return features.view(-1, *self.feature_shape)


def spread_growth(size: int, layers: int) -> list[int]:
    """Kernel sizes of `layers` stride-1 (transposed) convolutions that together take a map from 1 to `size` (or back).

    A kernel of k grows a map by k - 1. The growth is spread evenly, larger kernels last, where there are fewer channels;
    for the published size of 5 and four layers this gives the published 2x2 kernels.
    """
    growth, extra = divmod(size - 1, layers)
    return [growth + 1 + (1 if layer >= layers - extra else 0) for layer in range(layers)]


def _last_activation(feature_range: FeatureRange) -> nn.Module:
    return nn.Sigmoid() if feature_range is FeatureRange.UNIT else nn.ReLU()


def _conv(feature_shape: tuple[int, ...], classes: int, noise_dim: int, feature_range: FeatureRange) -> nn.Module:
    """FedCG's generator: four transposed convolutions (512-256-128-c), batch norm, leaky ReLU 0.2; no biases."""
    channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
    kernels = list(zip(spread_growth(height, 4), spread_growth(width, 4), strict=True))
    layers: list[nn.Module] = []
    before = noise_dim + classes
    for after, kernel in zip(_WIDTHS, kernels[:3], strict=True):
        layers += [nn.ConvTranspose2d(before, after, kernel, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
        before = after
    layers += [nn.ConvTranspose2d(before, channels, kernels[3], bias=False), _last_activation(feature_range)]
    return ConditionalGenerator(nn.Sequential(*layers), (noise_dim + classes, 1, 1), feature_shape, classes)


def _mlp(feature_shape: tuple[int, ...], classes: int, noise_dim: int, feature_range: FeatureRange) -> nn.Module:
    """A fully connected generator: (noise + label) - 256 - features, batch norm on the hidden layer.

    With 64-dimensional noise this is the "64-256-features" network. FedMD-CG uses three fully connected layers (widths not
    given); this has two.
    """
    body = nn.Sequential(
        nn.Linear(noise_dim + classes, _HIDDEN, bias=False),
        nn.BatchNorm1d(_HIDDEN),
        nn.LeakyReLU(0.2),
        nn.Linear(_HIDDEN, math.prod(feature_shape)),
        _last_activation(feature_range),
    )
    return ConditionalGenerator(body, (noise_dim + classes,), feature_shape, classes)


GENERATORS: Mapping[str, GeneratorBuilder] = {"conv": _conv, "mlp": _mlp}
