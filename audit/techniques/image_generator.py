"""An attacker's network from vectors to images, which knows beforehand what images of the kind look like."""

from __future__ import annotations

import torch
from torch import nn

from audit.measures.images import unit_pixels
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.layers.initial_values import draw_weights
from fedcg.learning.networks.layers.layer_randomness import lent_generators

_HIDDEN = 256
_COMPONENTS = 64
_MOST_IMAGES = 1000
_MOST_NUMBERS = 1 << 24  # of the images that the components are computed from: 64 MB


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
        _, vectors = torch.linalg.eigh(
            spread @ spread.T
        )  # of rows x rows numbers: images may have more pixels than there are images
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
