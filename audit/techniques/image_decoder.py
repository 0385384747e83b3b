"""An attacker's network from vectors to images, which knows beforehand what images of the kind look like, and its training as a decoder."""

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
_MOST_IMAGES = 1000
_MOST_NUMBERS = 1 << 24  # of the images that the components are computed from: 64 MB
_DECODER_LR = 1e-3
_BATCH = 32
_FAR = 3.0  # deviations of the known features: samples of a generator that is little trained lie far outside of them

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Features [N, F] -> pictures [N, C, H, W] in [0, 1]."""


class ImageGenerator(nn.Module):
    """Two linear layers to coefficients of the principal components of known images; coefficients of the known images are ~ N(0, 1).

    In the place of Anti-GAN table 4's transposed convolutions: against one update, these find patterns that the discriminator takes for
    the class and that no person does (digits, a classifier with 94 % accuracy: SSIM 0.12, the mean image 0.36). The published
    attack sees hundreds of updates, each of which corrects the discriminator; the components stand in for that.
    """

    mean: torch.Tensor
    components: torch.Tensor

    def __init__(self, inputs: int, known: ImageSet, stream: torch.Generator) -> None:
        """Args: `inputs`: numbers in a vector; `known`: images, at least 2; `stream`: of the images taken and the first weights."""
        super().__init__()
        self._shape = known.images.shape[1:]
        most = max(2, min(_MOST_IMAGES, _MOST_NUMBERS // self._shape.numel()))
        chosen = torch.randperm(len(known), generator=stream)[:most]
        pixels = unit_pixels(known.images[chosen]).flatten(1)
        self.register_buffer("mean", pixels.mean(0))
        spread = pixels - self.mean
        # of rows x rows numbers: images may have more pixels than there are images
        _, vectors = torch.linalg.eigh(spread @ spread.T)
        largest = vectors[:, -min(_COMPONENTS, len(chosen) - 1) :]
        self.register_buffer("components", largest.T @ spread / len(chosen) ** 0.5)
        with lent_generators(0):  # values to be overwritten
            self.layers = nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, largest.shape[1]))
        draw_weights(self.layers, stream)

    def coefficients(self, vectors: torch.Tensor) -> torch.Tensor:
        """[B, inputs] -> [B, components]."""
        found: torch.Tensor = self.layers(vectors)
        return found

    def pixels(self, coefficients: torch.Tensor) -> torch.Tensor:
        """[B, components] -> [B, C, H, W], mostly in [0, 1]."""
        return (self.mean + coefficients @ self.components).view(-1, *self._shape)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """[B, inputs] -> [B, C, H, W], mostly in [0, 1]."""
        return self.pixels(self.coefficients(vectors))


def descend(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of an optimiser."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def trained_decoder(
    known: ImageSet, features: torch.Tensor, steps: int, streams: Streams, tick: Callable[[], None]
) -> Decoder:
    """A network from features [N, F] back to the pixels of the images [N] that they are of, by least squares."""
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
