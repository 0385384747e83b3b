"""How many pixels an observation can determine at all: the rank of its Jacobian at an image, a bound on every reconstruction."""

from __future__ import annotations

from collections.abc import Callable

import torch

RANK_TOLERANCE = 1e-6  # of the largest singular value; the observed numbers themselves are float32
MAX_PIXELS = 4096  # beyond, singular values of pixels x pixels take minutes and gigabytes
_OVERSAMPLED = 16
_ROWS_AT_ONCE = 64

Observation = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def pixel_rank(observation: Observation, pixels: torch.Tensor, stream: torch.Generator) -> int:
    """Rank of ∂ observation / ∂ pixels: singular values above `RANK_TOLERANCE` of the largest.

    Where there are more observed numbers than pixels, their Jacobian is multiplied from the left by a Gaussian matrix of
    16 rows more than pixels, which leaves the rank as it is.

    Args:
        observation: differentiable; [1, C, H, W] -> tensors of any shape.
        pixels: [1, C, H, W].
        stream: for the Gaussian matrix.
    """
    place = pixels.clone().requires_grad_()
    seen = torch.cat([part.flatten() for part in observation(place)])
    rows = min(len(seen), pixels.numel() + _OVERSAMPLED)
    jacobian = torch.empty(rows, pixels.numel(), dtype=torch.float64)
    for first in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - first)
        if rows == len(seen):
            chosen = torch.eye(rows)[first : first + count]
        else:
            chosen = torch.randn(count, len(seen), generator=stream)
        (slopes,) = torch.autograd.grad(seen, place, chosen, retain_graph=True, is_grads_batched=True)
        jacobian[first : first + count] = slopes.flatten(1)
    values = torch.linalg.svdvals(jacobian)
    return int((values > RANK_TOLERANCE * values[0]).sum())
