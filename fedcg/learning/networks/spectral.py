"""Spectrally normalised layers: W x / σ(W) + b, with σ, the largest singular value, tracked by power iteration.

The same function as `torch.nn.utils.parametrizations.spectral_norm` (one iteration a forward pass in train mode, gradient through σ),
but σ divides the OUTPUT instead of the weights. That is equal, and saves several passes over the weight matrix per step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

_EPS = 1e-12


class SingularVectors(nn.Module):
    """Estimates of a weight matrix's first left and right singular vectors; buffers, so they travel with the weights."""

    left: torch.Tensor
    right: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("left", torch.empty(rows))
        self.register_buffer("right", torch.empty(columns))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """σ of [rows, columns], a scalar with gradient; in train mode the estimates improve by one iteration first."""
        if self.training:
            with torch.no_grad():
                F.normalize(matrix.mv(self.right), dim=0, eps=_EPS, out=self.left)
                F.normalize(matrix.t().mv(self.left), dim=0, eps=_EPS, out=self.right)
        # Copies: a later forward pass overwrites the buffers, and autograd still needs these values.
        return self.left.clone().dot(matrix.mv(self.right.clone()))

    def reset(self, generator: torch.Generator) -> None:
        """Start from random directions."""
        for vector in (self.left, self.right):
            direction = torch.randn(vector.shape, generator=generator)
            vector.copy_(direction / direction.norm())


class SpectralLinear(nn.Linear):
    """A linear layer divided by its weight's largest singular value."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.vectors = SingularVectors(outputs, inputs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs] -> [B, outputs]."""
        scale: torch.Tensor = self.vectors(self.weight)
        return F.linear(input, self.weight) / scale + self.bias


class SpectralConv2d(nn.Conv2d):
    """A convolution divided by the largest singular value of its weight, flattened to [outputs, the rest]."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__(inputs, outputs, kernel)
        self.vectors = SingularVectors(outputs, inputs * kernel[0] * kernel[1])

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        assert self.bias is not None
        scale: torch.Tensor = self.vectors(self.weight.flatten(1))
        convolved: torch.Tensor = self._conv_forward(input, self.weight, None)
        return convolved / scale + self.bias.view(-1, 1, 1)
