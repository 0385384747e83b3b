"""Spectrally normalised layers: W x / σ(W) + b, with σ, the largest singular value, tracked by power iteration.

The same function as `torch.nn.utils.parametrizations.spectral_norm` (one iteration a forward pass in train mode, gradient through σ).
σ divides the OUTPUT instead of the weights, and after an iteration σ = ‖Wᵀu‖, which that iteration has computed. Several
passes can go through in one call (`passes`): each has its own iteration and its own σ, as if they had come one after the other,
and they share the matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.autograd.function import once_differentiable

from fedcg.learning.networks.layers.small_maps import (
    Form,
    Size,
    form_for,
    form_of,
    matrices_of,
    products,
    weight_of,
    without_values,
)

_EPS = 1e-12


class SingularVectors(nn.Module):
    """Estimates of a weight matrix's first left and right singular vectors; buffers, so they travel with the weights."""

    left: torch.Tensor
    right: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("left", torch.empty(rows))
        self.register_buffer("right", torch.empty(columns))

    @torch.no_grad()
    def forward(self, matrices: torch.Tensor, passes: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Singular vectors and values for some passes in a row; in train mode each begins with one iteration.

        Args:
            matrices: [K, inputs, outputs], the weight; `right` has the order (inputs, K).
            passes: how many.

        Returns:
            Left vectors [passes, outputs], right ones [passes, K * inputs], σ [passes].
        """
        positions, inputs, outputs = matrices.shape
        matrix = matrices.reshape(positions * inputs, outputs)
        left, right = self.left, self.right.view(inputs, positions).t().flatten()
        seen = []
        for _ in range(passes):
            if self.training:
                left = F.normalize(right @ matrix, dim=0, eps=_EPS)
                across = matrix @ left
                sigma = across.norm()
                right = across / sigma.clamp_min(_EPS)
            else:
                sigma = left.dot(right @ matrix)
            seen.append((left, right, sigma))
        if self.training:
            self.left.copy_(left)
            self.right.copy_(right.view(positions, inputs).t().flatten())
        lefts, rights, sigmas = (torch.stack(column) for column in zip(*seen, strict=True))
        return lefts, rights, sigmas

    def reset(self, generator: torch.Generator) -> None:
        """Start from random directions."""
        for vector in (self.left, self.right):
            direction = torch.randn(vector.shape, generator=generator)
            vector.copy_(direction / direction.norm())


class _Normalised(torch.autograd.Function):
    """A convolution divided by σ, row by row of its pass. Args: maps, weight, form, left and right vectors, σ."""

    @staticmethod
    def forward(
        ctx: Any,
        maps: torch.Tensor,
        weight: torch.Tensor,
        form: Form,
        lefts: torch.Tensor,
        rights: torch.Tensor,
        sigmas: torch.Tensor,
    ) -> torch.Tensor:
        """[B, inputs, H, W] -> [B, outputs, H', W']."""
        ctx.products = products(maps, weight, form)
        scale = sigmas.reciprocal().repeat_interleave(maps.shape[0] // len(sigmas)).view(-1, 1, 1, 1)
        output: torch.Tensor = ctx.products.output() * scale
        ctx.save_for_backward(output, scale, lefts, rights, sigmas)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of maps and weight, where they are needed."""
        output, scale, lefts, rights, sigmas = ctx.saved_tensors
        made = ctx.products
        left = made.left(grad * scale)
        to_maps = made.to_maps(left) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_matrices = made.to_matrices(left)
            # dσ/dW = u vᵀ, and the loss falls by grad · output / σ per unit of σ.
            share = (grad * output).sum(dim=(1, 2, 3)).view(len(sigmas), -1).sum(dim=1) / sigmas
            to_matrices.view(-1, lefts.shape[1]).addmm_(rights.t(), lefts * -share.unsqueeze(1))
            to_weight = weight_of(to_matrices, made.kernel, grows=False)
        return to_maps, to_weight, None, None, None, None


class SpectralLinear(nn.Linear):
    """A linear layer divided by its weight's largest singular value."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(self.weight.new_empty(inputs, outputs).t())
        self.vectors = SingularVectors(outputs, inputs)

    def forward(self, input: torch.Tensor, passes: int = 1) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs] -> [B, outputs]; the batch holds `passes` passes of equal size, one after the other."""
        weight = self.weight.view(*self.weight.shape, 1, 1)
        vectors = self.vectors(matrices_of(weight, grows=False), passes)
        form = form_of((1, 1), (1, 1), weight.dtype, grows=False)
        maps = input.view(*input.shape, 1, 1)
        normalised: torch.Tensor = _Normalised.apply(maps, weight, form, *vectors)  # type: ignore[no-untyped-call]
        return normalised.flatten(1) + self.bias


class SpectralConv2d(nn.Conv2d):
    """A convolution divided by the largest singular value of its weight, flattened to [outputs, the rest]."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, bias=bias)
        self.weight = without_values(self.weight, grows=False)
        self.vectors = SingularVectors(outputs, inputs * kernel[0] * kernel[1])

    def forward(self, input: torch.Tensor, passes: int = 1) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, H', W']; the batch holds `passes` passes of equal size, one after the other."""
        vectors = self.vectors(matrices_of(self.weight, grows=False), passes)
        form = form_for(input, self.weight, grows=False)
        if form is None:
            normalised = self._on_large_maps(input, *vectors)
        else:
            normalised = _Normalised.apply(input, self.weight, form, *vectors)  # type: ignore[no-untyped-call]
        return normalised if self.bias is None else normalised + self.bias.view(-1, 1, 1)

    def _on_large_maps(
        self, maps: torch.Tensor, lefts: torch.Tensor, rights: torch.Tensor, sigmas: torch.Tensor
    ) -> torch.Tensor:
        # With the vectors held fixed σ = uᵀ W v, whose gradient is u vᵀ.
        across = torch.einsum("pk,ko->po", rights, matrices_of(self.weight, grows=False).flatten(0, 1))
        scale = (lefts * across).sum(dim=1).repeat_interleave(maps.shape[0] // len(sigmas))
        return F.conv2d(maps, self.weight) / scale.view(-1, 1, 1, 1)
