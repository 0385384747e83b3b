"""An attacker's network from vectors to images, with prior knowledge of such images, and its training as a decoder."""

from collections.abc import Callable

import torch
from torch import nn

from audit.measures import unit_pixels
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.optimisers import adam

_HIDDEN = 256
_COMPONENTS = 64
_LEAST_VARIANCE = 1e-7  # of the largest: below it there is rounding only
_MOST_IMAGES = 1000
_MOST_NUMBERS = 1 << 24  # numbers of the images for computing the components: 64 MB
_DECODER_LR = 1e-3
_BATCH = 32
_FAR = 3.0  # in deviations of the known features: samples of a barely trained generator lie far outside

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Features [N, F] -> pictures [N, C, H, W] in [0, 1]."""


class PrincipalComponents(nn.Module):
    """The mean and the principal components of known images, scaled so that their coefficients are ~ N(0, 1)."""

    mean: torch.Tensor
    components: torch.Tensor

    def __init__(self, known: ImageSet, most: int, stream: torch.Generator) -> None:
        """Args: `known`: images, at least 2; `most`: components; `stream`: for choosing images if there are many."""
        super().__init__()
        self._known, self._shape = known, known.images.shape[1:]
        count = max(2, min(_MOST_IMAGES, _MOST_NUMBERS // self._shape.numel()))
        chosen = torch.randperm(len(known), generator=stream)[:count]
        pixels = unit_pixels(known.images[chosen]).flatten(1)
        self.register_buffer("mean", pixels.mean(0))
        spread = pixels - self.mean
        # rows x rows numbers: images may have more pixels than there are images
        values, vectors = torch.linalg.eigh(spread @ spread.T)
        count = int((values > _LEAST_VARIANCE * values[-1]).sum())
        largest = vectors[:, -min(most, len(chosen) - 1, count) :]
        self.register_buffer("components", largest.T @ spread / len(chosen) ** 0.5)

    def pixels(self, coefficients: torch.Tensor) -> torch.Tensor:
        """[B, components] -> [B, C, H, W], mostly in [0, 1]."""
        return (self.mean + coefficients @ self.components).view(-1, *self._shape)

    def class_means(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the coefficients [B, components] of the mean known image of labels [B]; of all images for a class without any."""
        pixels, known = unit_pixels(self._known.images).flatten(1), self._known.labels
        means = [pixels[known == label].mean(0) if (known == label).any() else self.mean for label in labels]
        return (torch.stack(means) - self.mean) @ self.components.T / self.components.square().sum(1)


class ImageGenerator(nn.Module):
    """Two linear layers to coefficients of the principal components of known images.

    They replace the transposed convolutions of Anti-GAN table 4. Against one update, those find patterns that the
    discriminator assigns to the class and that a person does not recognise (digits, a classifier with 94 % accuracy:
    SSIM 0.12; the mean image has 0.36). The published attack uses hundreds of updates, each of which corrects the
    discriminator. The components make up for that.
    """

    def __init__(self, inputs: int, known: ImageSet, stream: torch.Generator) -> None:
        """Args: `inputs`: numbers in a vector; `known`: images, at least 2; `stream`: for choosing images and initial weights."""
        super().__init__()
        self._space = PrincipalComponents(known, _COMPONENTS, stream)
        count = len(self._space.components)
        with lent_generators(0):  # values to be overwritten
            self.layers = nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, count))
        draw_weights(self.layers, stream)

    def coefficients(self, vectors: torch.Tensor) -> torch.Tensor:
        """[B, inputs] -> [B, components]."""
        found: torch.Tensor = self.layers(vectors)
        return found

    def pixels(self, coefficients: torch.Tensor) -> torch.Tensor:
        """[B, components] -> [B, C, H, W], mostly in [0, 1]."""
        return self._space.pixels(coefficients)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """[B, inputs] -> [B, C, H, W], mostly in [0, 1]."""
        return self.pixels(self.coefficients(vectors))


def descend(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one step of an optimiser."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def trained_decoder(
    known: ImageSet, features: torch.Tensor, steps: int, streams: Streams, tick: Callable[[], None]
) -> Decoder:
    """Train a network from features [N, F] to the pixels of their images [N], by least squares."""
    deviation, mean = torch.std_mean(features, 0)
    decoder, stream = ImageGenerator(features.shape[1], known, streams.generator("decoder")), streams.generator("steps")
    optimiser, scale = adam(decoder.parameters(), _DECODER_LR, 0.0), deviation + 1e-6 + 0.01 * deviation.mean()
    pixels, inputs = unit_pixels(known.images), (features - mean) / scale
    for _ in range(steps):
        rows = torch.randint(len(pixels), (_BATCH,), generator=stream)
        loss = nn.functional.mse_loss(decoder(inputs[rows]), pixels[rows])
        descend(optimiser, loss)
        tick()

    @torch.no_grad()
    def decode(some: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = decoder(((some - mean) / scale).clamp(-_FAR, _FAR))
        return pixels.clamp(0, 1)

    return decode
