"""Adam for a training loop on a CPU: torch's fused kernel without what surrounds it.

`torch.optim.Adam(fused=True)` copies every weight that is not contiguous in and out of each step, and spends as long around a
small network's kernel as in it. Here weights in any dense memory order are handed to the kernel as the block of memory that
they are. Same arithmetic, same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fedcg.learning.training.eager_optimisers import eager

_EPS = 1e-8  # torch's default


@eager
class FusedAdam(torch.optim.Optimizer):
    """Adam with L2 weight decay over dense float32 or float64 weights on the CPU; takes one step per `step`, without a closure."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._weights: list[torch.Tensor] = self.param_groups[0]["params"]
        self._blocks = [block_of(weight.detach()) for weight in self._weights]
        self._means = [torch.zeros_like(block) for block in self._blocks]
        self._squares = [torch.zeros_like(block) for block in self._blocks]
        self._count = torch.zeros((), dtype=torch.float32)
        for weight, mean, square in zip(self._weights, self._means, self._squares, strict=True):
            self.state[weight] = {"step": self._count, "exp_avg": mean, "exp_avg_sq": square}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are; a weight without one stays, and its moments with it.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("this optimiser takes no closure")
        at = [index for index, weight in enumerate(self._weights) if weight.grad is not None]
        self._count += 1
        group = self.param_groups[0]
        torch._fused_adam_(  # the kernel behind torch.optim.Adam(fused=True)
            [self._blocks[index] for index in at],
            [_aligned(self._weights[index]) for index in at],
            [self._means[index] for index in at],
            [self._squares[index] for index in at],
            [],
            [self._count] * len(at),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=_EPS,
            amsgrad=False,
            maximize=False,
        )


def block_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as a contiguous view: its dimensions in the order of their strides."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
    return tensor.permute(order)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight in the weight's memory order."""
    grad = weight.grad
    assert grad is not None
    if grad.stride() != weight.stride():
        grad = torch.empty_like(weight).copy_(grad)
    return block_of(grad)
