"""Conditional generators, (noise z, label y) -> features, and conditional discriminators, (features, label) -> one logit.

The label enters as a learned C-dimensional embedding concatenated to the noise. The last activation follows the range of the
split's features: a sigmoid for features in (0, 1), a ReLU for features >= 0.

FedCG writes D(h) without the label, but calls the pair a conditional GAN and does not specify how the label enters. By
default it enters by projection: logit = ψ(φ(h)) + <embedding(y), φ(h)>. Ten concatenated numbers are easily ignored
among 400 features, and the classifier then recognises few generated rows. Every layer with weights on φ and ψ is
spectrally normalised, as in the authors' code. There is no batch norm, so real and generated rows can share ONE pass.
`conv_plain` and `mlp_plain` are the defaults without spectral norm, for DP-SGD: no buffers, and rows are independent.
`conv_published` is the authors' own network: concatenated label, spectral norm AND batch norm, so real and generated
rows need separate passes, as in their code.
"""

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedcg.learning.errors import ExtensionError, NetworkError
from fedcg.learning.networks.fast_layers import (
    MapBatchNorm2d,
    Size,
    SmallConvTranspose2d,
    SpectralConv2d,
    SpectralLinear,
)
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from fedcg.learning.networks.splits import FeatureRange
from fedcg.learning.registry import imported, registered

GeneratorBuilder = Callable[[tuple[int, ...], int, int, FeatureRange], nn.Module]


def empty_embedding(classes: int, width: int) -> nn.Embedding:
    """A trainable [C, width] label embedding without initial values.

    `nn.Embedding` would draw them, and drawing on the meta device makes torch import 800 modules (1.2 s).
    """
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(classes, width), freeze=False)
    return embedding


class ConditionalGenerator(nn.Module):
    """Embeds the label, concatenates it to the noise, and reshapes the body's output to the feature shape."""

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
        return features.reshape(-1, *self.feature_shape)


_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@functools.lru_cache(maxsize=8)
def _directions(numbers: int, features: int, device: torch.device) -> torch.Tensor:
    """[numbers, features]: columns of length 1 in distinct directions, the same on every machine."""
    rows, columns = (torch.arange(1, size + 1, dtype=torch.float64, device=device) for size in (numbers, features))
    turns = torch.outer(rows, columns) * _GOLDEN
    waves = torch.cos(2.0 * math.pi * (turns - turns.floor())).float()
    directions: torch.Tensor = waves / waves.norm(dim=0, keepdim=True).clamp(min=1e-6)
    return directions


class ClassGaussians(nn.Module):
    """A separate Gaussian for each feature of each class, clamped to the features' range. z is projected on fixed unit vectors.

    The directions are a function of their indices, so they are neither sent nor drawn. Features share `noise_dim` of
    them.
    """

    def __init__(
        self, feature_shape: tuple[int, ...], classes: int, noise_dim: int, feature_range: FeatureRange
    ) -> None:
        super().__init__()
        self.mean, self.deviation = (empty_embedding(classes, math.prod(feature_shape)) for _ in range(2))
        self.feature_shape, self.noise_dim = feature_shape, noise_dim
        self.bounds = feature_range.bounds

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Features [B, *feature_shape] for z [B, noise_dim] and labels [B]."""
        shared: torch.Tensor = noise @ _directions(self.noise_dim, math.prod(self.feature_shape), noise.device)
        features: torch.Tensor = self.mean(labels) + self.deviation(labels) * shared
        return features.clamp(*self.bounds).reshape(-1, *self.feature_shape)

    @torch.no_grad()
    def fit(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Set means and standard deviations from features [N, ...] by class. Classes without features are not changed."""
        rows = features.flatten(1)
        for label in labels.unique():
            of_class = rows[labels == label]
            self.mean.weight[label] = of_class.mean(0)
            self.deviation.weight[label] = of_class.std(0, unbiased=False)


def spread_growth(size: int, layers: int) -> list[int]:
    """Kernel sizes of `layers` stride-1 (transposed) convolutions that together take a map from 1 to `size` (or back).

    A kernel of k grows a map by k - 1. The growth is distributed evenly, with larger kernels last, where there are
    fewer channels. For the published size of 5 and four layers this gives the published 2x2 kernels.
    """
    growth, extra = divmod(size - 1, layers)
    return [growth + 1 + (1 if layer >= layers - extra else 0) for layer in range(layers)]


def _last_activation(feature_range: FeatureRange) -> nn.Module:
    return {FeatureRange.UNIT: nn.Sigmoid(), FeatureRange.NON_NEGATIVE: nn.ReLU()}.get(feature_range, nn.Identity())


def _conv(widths: tuple[int, int, int]) -> GeneratorBuilder:
    """Four transposed convolutions, batch norm, leaky ReLU 0.2, no biases; FedCG's generator for widths 512-256-128."""

    def build(feature_shape: tuple[int, ...], classes: int, noise_dim: int, feature_range: FeatureRange) -> nn.Module:
        channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
        kernels = list(zip(spread_growth(height, 4), spread_growth(width, 4), strict=True))
        layers: list[nn.Module] = []
        before = noise_dim + classes
        for after, kernel in zip(widths, kernels[:3], strict=True):
            layers += [SmallConvTranspose2d(before, after, kernel), MapBatchNorm2d(after), nn.LeakyReLU(0.2)]
            before = after
        layers += [SmallConvTranspose2d(before, channels, kernels[3]), _last_activation(feature_range)]
        return ConditionalGenerator(nn.Sequential(*layers), (noise_dim + classes, 1, 1), feature_shape, classes)

    return build


def _mlp(*widths: int) -> GeneratorBuilder:
    """Fully connected: (noise + label) - widths - features, batch norm and leaky ReLU 0.2 on the hidden layers."""

    def build(feature_shape: tuple[int, ...], classes: int, noise_dim: int, feature_range: FeatureRange) -> nn.Module:
        layers: list[nn.Module] = []
        before = noise_dim + classes
        for after in widths:
            layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.LeakyReLU(0.2)]
            before = after
        layers += [nn.Linear(before, math.prod(feature_shape)), _last_activation(feature_range)]
        return ConditionalGenerator(nn.Sequential(*layers), (noise_dim + classes,), feature_shape, classes)

    return build


# Bytes of the parameters for features of 16x5x5, ten classes, noise of 100 dimensions (of 64):
#   conv        3,562,896 (3,267,984)  as published in FedCG
#   conv_small    399,504   (325,776)  a quarter of its channels
#   mlp3        1,167,312 (1,093,584)  FedMD-CG's three fully connected layers, with the widths of its authors' code
#   mlp           526,288   (489,424)  two layers; with noise of 64, "64-256-features"
#   mlp_small     264,144   (245,712)  half of its width; with noise of 64, "64-128-features"
#   gaussians      32,000    (32,000)  a mean and a standard deviation of each feature by class
GENERATORS: Mapping[str, GeneratorBuilder] = {
    "conv": _conv((512, 256, 128)),
    "conv_small": _conv((128, 64, 32)),
    "mlp": _mlp(256),
    "mlp3": _mlp(512, 256),
    "mlp_small": _mlp(128),
    "gaussians": ClassGaussians,
}

ENTRY_POINT_GROUP = "fedcg.generators"
_ROWS = 3


def _own() -> Mapping[str, str]:
    return registered(ENTRY_POINT_GROUP, frozenset(GENERATORS))


def generator_names() -> tuple[str, ...]:
    """All generators, including installed ones of the user.

    Raises:
        ExtensionError: two installed packages use one name for different generators, or one uses the name of a built-in
            generator.
    """
    return tuple(sorted(GENERATORS.keys() | _own().keys()))


def build_generator(name: str, asked: tuple[tuple[int, ...], int, int, FeatureRange]) -> nn.Module:
    """Build a generator for (feature shape, classes, noise dimension, feature range). A user's generator is tested first.

    Raises:
        NetworkError: unknown name; the message lists the available ones.
        ExtensionError: see `generator_names`, or an installed package's generator can't be imported or fails its test.
    """
    own = _own()
    if name in GENERATORS:
        return GENERATORS[name](*asked)
    if name not in own:
        raise NetworkError(f"no generator {name!r}; choose from {', '.join(generator_names())}")
    builder: GeneratorBuilder = imported(own[name])
    _rehearse(own[name], builder, asked)
    return builder(*asked)


@functools.cache
def _rehearse(target: str, builder: GeneratorBuilder, asked: tuple[tuple[int, ...], int, int, FeatureRange]) -> None:
    """Run a user's generator on random noise, in eval mode; once per process and feature form.

    Raises:
        ExtensionError: names the function and the problem.
    """
    feature_shape, classes, noise_dim, feature_range = asked
    stream = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"), lent_generators(0), torch.no_grad():
            module = builder(*asked)
            draw_weights(module, stream)
            labels = torch.arange(_ROWS) % classes
            features = module.eval()(torch.randn(_ROWS, noise_dim, generator=stream), labels)
            low, high = float(features.min()), float(features.max())
    except Exception as error:
        raise ExtensionError(f"generator {target} can't be built and run: {type(error).__name__}: {error}") from error
    if features.shape != (_ROWS, *feature_shape):
        raise ExtensionError(f"generator {target} returns features {[*features.shape]}, not {[_ROWS, *feature_shape]}")
    if not feature_range.bounds[0] <= low <= high <= feature_range.bounds[1]:
        raise ExtensionError(
            f"generator {target} returns features from {low:.3g} to {high:.3g}, but the split's range is {feature_range.value}: end it in "
            "a sigmoid (unit) or a ReLU (non_negative)"
        )


DiscriminatorBuilder = Callable[[tuple[int, ...], int], nn.Module]
_WIDTHS = (128, 256, 512)
_HIDDEN = 256
_SLOPE = 0.2


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

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits."""
        inner: torch.Tensor = self.body(features.reshape(-1, *self.input_shape))
        logits: torch.Tensor = self.head(inner).squeeze(1) + (self.embedding(labels) * inner).sum(dim=1)
        return logits


class ConcatenatingDiscriminator(nn.Module):
    """FedCG's discriminator as published: the label's embedding is added as C channels, constant over all positions."""

    def __init__(self, body: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = body
        self.embedding = empty_embedding(classes, classes)
        self.input_shape = input_shape

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, *feature_shape] float32 and [B] int64 -> [B] logits."""
        maps = features.reshape(-1, *self.input_shape)
        channels = self.embedding(labels)[:, :, None, None].expand(-1, -1, *self.input_shape[1:])
        logits: torch.Tensor = self.body(torch.cat([maps, channels], dim=1))
        return logits.flatten()


def _convolutions(channels: int, height: int, width: int) -> list[tuple[int, int, Size]]:
    """Inputs, outputs and kernels of the mirrored published generator, down to a single position."""
    kernels = zip(spread_growth(height, 4)[::-1], spread_growth(width, 4)[::-1], strict=True)
    widths = (channels, *_WIDTHS, _WIDTHS[-1])
    return list(zip(widths[:-1], widths[1:], kernels, strict=True))


def _as_maps(feature_shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = feature_shape if len(feature_shape) == 3 else (math.prod(feature_shape), 1, 1)
    return channels, height, width


def _conv_discriminator(
    conv: Callable[[int, int, Size], nn.Module], linear: Callable[[int, int], nn.Linear]
) -> DiscriminatorBuilder:
    """Mirror of the published generator: convolutions 128-256-512, and a last one down to a single position."""

    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        shape = _as_maps(feature_shape)
        layers: list[nn.Module] = []
        for before, after, kernel in _convolutions(*shape):
            layers += [conv(before, after, kernel), nn.LeakyReLU(_SLOPE)]
        body, width = nn.Sequential(*layers, nn.Flatten()), _WIDTHS[-1]
        return ProjectionDiscriminator(body, linear(width, 1), shape, classes, width)

    return build


def _conv_published(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Four convolutions 128-256-512-1 without biases, batch norm between them; it mixes the rows of a pass."""
    channels, height, width = _as_maps(feature_shape)
    *inner, last = _convolutions(channels + classes, height, width)
    layers: list[nn.Module] = []
    for before, after, kernel in inner:
        layers += [SpectralConv2d(before, after, kernel, bias=False), MapBatchNorm2d(after), nn.LeakyReLU(_SLOPE)]
    layers.append(SpectralConv2d(last[0], 1, last[2], bias=False))
    return ConcatenatingDiscriminator(nn.Sequential(*layers), (channels, height, width), classes)


def _mlp_discriminator(linear: Callable[[int, int], nn.Linear]) -> DiscriminatorBuilder:
    """Features - 256 - 1."""

    def build(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
        width = math.prod(feature_shape)
        body = nn.Sequential(linear(width, _HIDDEN), nn.LeakyReLU(_SLOPE))
        return ProjectionDiscriminator(body, linear(_HIDDEN, 1), (width,), classes, _HIDDEN)

    return build


def rows_are_independent(discriminator: nn.Module) -> bool:
    """Whether real and generated rows may share one pass: no batch norm mixes rows."""
    return not any(isinstance(layer, nn.BatchNorm2d) for layer in discriminator.modules())


DISCRIMINATORS: Mapping[str, DiscriminatorBuilder] = {
    "conv": _conv_discriminator(SpectralConv2d, SpectralLinear),
    "conv_plain": _conv_discriminator(nn.Conv2d, nn.Linear),
    "conv_published": _conv_published,
    "mlp": _mlp_discriminator(SpectralLinear),
    "mlp_plain": _mlp_discriminator(nn.Linear),
}
