"""Conditional discriminators: (features, label) -> one logit; D = sigmoid(logit) tends to 1 on real features.

FedCG writes D(h) without the label, but calls the pair a conditional GAN and does not say how the label enters. By default it
enters by projection: logit = ψ(φ(h)) + <embedding(y), φ(h)>. Concatenated to the features, ten numbers beside 400 are
easily ignored, and the classifier then recognises few generated rows. Every layer with weights on φ and ψ is spectrally
normalised, as in the authors' code. No batch norm: real and generated rows can then go through in ONE pass.
`conv_plain` and `mlp_plain` are the default ones without spectral norm, for DP-SGD: no buffer, and no row sees another.
`conv_published` is the authors' own network: concatenated label, spectral norm AND batch norm, so real and generated rows need
a pass each, as in their code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.networks.generators import empty_embedding, spread_growth
from fedcg.learning.networks.layers.small_maps import MapBatchNorm2d, Size
from fedcg.learning.networks.layers.spectral import SpectralConv2d, SpectralLinear

DiscriminatorBuilder = Callable[[tuple[int, ...], int], nn.Module]
_WIDTHS = (128, 256, 512)
_HIDDEN = 256
_SLOPE = 0.2
_WITH_PASSES = (SpectralConv2d, SpectralLinear, MapBatchNorm2d)


def run(layer: nn.Module, rows: torch.Tensor, passes: int) -> torch.Tensor:
    """A layer on a batch of some passes of equal size, as if they had come one after the other."""
    result: torch.Tensor = layer(rows, passes) if isinstance(layer, _WITH_PASSES) else layer(rows)
    return result


class Passes(nn.Sequential):
    """A chain of layers some of which treat the passes in a batch separately (spectral norm, batch norm)."""

    def forward(self, input: torch.Tensor, passes: int = 1) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[passes * B, ...] -> [passes * B, ...]."""
        for layer in self:
            input = run(layer, input, passes)  # noqa: A001
        return input


class ProjectionDiscriminator(nn.Module):
    """ψ(φ(h)) + <embedding(y), φ(h)> over a body φ that ends in a vector."""

    def __init__(
        self, body: nn.Module, head: nn.Linear, input_shape: tuple[int, ...], classes: int, width: int
    ) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.embedding = empty_embedding(classes, width)
        self.input_shape = input_shape

    def forward(self, features: torch.Tensor, labels: torch.Tensor, passes: int = 1) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits; the batch holds `passes` passes of equal size."""
        inner: torch.Tensor = self.body(features.reshape(-1, *self.input_shape), passes)
        logits: torch.Tensor = run(self.head, inner, passes).squeeze(1) + (self.embedding(labels) * inner).sum(dim=1)
        return logits


class ConcatenatingDiscriminator(nn.Module):
    """FedCG's discriminator as published: the label's embedding enters as C more channels, equal at every position."""

    def __init__(self, body: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = body
        self.embedding = empty_embedding(classes, classes)
        self.input_shape = input_shape

    def forward(self, features: torch.Tensor, labels: torch.Tensor, passes: int = 1) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits; the batch holds `passes` passes of equal size."""
        maps = features.reshape(-1, *self.input_shape)
        channels = self.embedding(labels)[:, :, None, None].expand(-1, -1, *self.input_shape[1:])
        logits: torch.Tensor = self.body(torch.cat([maps, channels], dim=1), passes)
        return logits.flatten()


def _convolutions(channels: int, height: int, width: int) -> list[tuple[int, int, Size]]:
    """Inputs, outputs and kernels of a mirror of the published generator, down to a single position."""
    kernels = zip(spread_growth(height, 4)[::-1], spread_growth(width, 4)[::-1], strict=True)
    widths = (channels, *_WIDTHS, _WIDTHS[-1])
    return list(zip(widths[:-1], widths[1:], kernels, strict=True))


def _as_maps(feature_shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
    return channels, height, width


def _conv(conv: Callable[[int, int, Size], nn.Module], linear: Callable[[int, int], nn.Linear]) -> DiscriminatorBuilder:
    """Mirror of the published generator: convolutions 128-256-512 and a last one down to a single position."""

    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        shape = _as_maps(feature_shape)
        layers: list[nn.Module] = []
        for before, after, kernel in _convolutions(*shape):
            layers += [conv(before, after, kernel), nn.LeakyReLU(_SLOPE)]
        body, width = Passes(*layers, nn.Flatten()), _WIDTHS[-1]
        return ProjectionDiscriminator(body, linear(width, 1), shape, classes, width)

    return build


def _conv_published(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Four convolutions 128-256-512-1 without biases, batch norm between them; rows of one pass see each other."""
    channels, height, width = _as_maps(feature_shape)
    *inner, last = _convolutions(channels + classes, height, width)
    layers: list[nn.Module] = []
    for before, after, kernel in inner:
        layers += [SpectralConv2d(before, after, kernel, bias=False), MapBatchNorm2d(after), nn.LeakyReLU(_SLOPE)]
    layers.append(SpectralConv2d(last[0], 1, last[2], bias=False))
    return ConcatenatingDiscriminator(Passes(*layers), (channels, height, width), classes)


def _mlp(linear: Callable[[int, int], nn.Linear]) -> DiscriminatorBuilder:
    """Features - 256 - 1."""

    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        width = math.prod(feature_shape)
        body = Passes(linear(width, _HIDDEN), nn.LeakyReLU(_SLOPE))
        return ProjectionDiscriminator(body, linear(_HIDDEN, 1), (width,), classes, _HIDDEN)

    return build


def rows_are_independent(discriminator: nn.Module) -> bool:
    """Whether real and generated rows may share one pass: no batch norm, so that no row sees another."""
    return not any(isinstance(layer, nn.BatchNorm2d) for layer in discriminator.modules())


DISCRIMINATORS: Mapping[str, DiscriminatorBuilder] = {
    "conv": _conv(SpectralConv2d, SpectralLinear),
    "conv_plain": _conv(nn.Conv2d, nn.Linear),
    "conv_published": _conv_published,
    "mlp": _mlp(SpectralLinear),
    "mlp_plain": _mlp(nn.Linear),
}
