"""A convolution and the 2x2 pool after it in one; same functions and same tensors as `nn.Conv2d` followed by the pool.

An average is linear: together with the convolution it is one convolution of stride 2, whose kernel is the mean of four copies of
the kernel, shifted by one: 6x6 instead of 5x5, at a quarter of the positions. For a maximum the four shifted kernels give the four
pixels of every window as four maps, whose maximum runs over memory in order; torch's own max pool costs as much as the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.autograd.function import once_differentiable


def is_exporting() -> bool:
    """Whether a graph is being recorded: an exported one has torch's two layers, with kernels that are constants."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())  # type: ignore[no-untyped-call, attr-defined]


def is_transformed() -> bool:
    """Whether torch.func differentiates row by row (per-sample gradients): it takes torch's own operations only."""
    return torch._C._are_functorch_transforms_active()  # noqa: SLF001 - what torch.autograd.Function itself asks


class AveragedConv2d(nn.Conv2d):
    """`nn.AvgPool2d(2)(nn.Conv2d(inputs, outputs, kernel)(images))`."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, (H - kernel + 1) // 2, (W - kernel + 1) // 2]."""
        if is_exporting():
            return F.avg_pool2d(super().forward(input), 2)
        tall = F.pad(self.weight, (0, 0, 0, 1)) + F.pad(self.weight, (0, 0, 1, 0))
        wide = F.pad(tall, (0, 1)) + F.pad(tall, (1, 0))
        return F.conv2d(input, 0.25 * wide, self.bias, stride=2)


Quarters = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quarters_in_windows(maps: torch.Tensor) -> Quarters:
    """The four pixels of each 2x2 window, row by row: views of [B, C, H, W] with even sides."""
    return maps[..., 0::2, 0::2], maps[..., 0::2, 1::2], maps[..., 1::2, 0::2], maps[..., 1::2, 1::2]


def quarters_in_turn(maps: torch.Tensor) -> Quarters:
    """The four pixels of each window where they lie in four groups of channels: views of [B, 4C, H, W]."""
    first, second, third, fourth = maps.chunk(4, dim=1)
    return first, second, third, fourth


class Maximum(torch.autograd.Function):
    """Maximum of four pixels. Args of `apply`: maps, and whether their quarters are groups of channels (else windows).

    The gradient goes to the first of equals, as in torch's max pool.
    """

    @staticmethod
    def forward(ctx: Any, maps: torch.Tensor, in_turn: bool) -> torch.Tensor:
        """[B, 4C, H, W] or [B, C, 2H, 2W] -> [B, C, H, W]."""
        ctx.quarters, ctx.shape = quarters_in_turn if in_turn else quarters_in_windows, maps.shape
        first, second, third, fourth = ctx.quarters(maps)
        upper, lower = torch.maximum(first, second), torch.maximum(third, fourth)
        ctx.save_for_backward(second > first, fourth > third, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradient of the maps."""
        is_second, is_fourth, is_lower = ctx.saved_tensors
        to_maps = grad.new_empty(ctx.shape)
        first, second, third, fourth = ctx.quarters(to_maps)
        lower = grad * is_lower
        upper = grad - lower
        second.copy_(upper * is_second)
        torch.sub(upper, second, out=first)
        fourth.copy_(lower * is_fourth)
        torch.sub(lower, fourth, out=third)
        return to_maps, None


class MaxedConv2d(nn.Conv2d):
    """`nn.MaxPool2d(2)(nn.Conv2d(inputs, outputs, kernel)(images))`."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, (H - kernel + 1) // 2, (W - kernel + 1) // 2]."""
        assert self.bias is not None
        if is_exporting() or is_transformed() or input.device.type != "cpu":
            return F.max_pool2d(super().forward(input), 2)
        # A gradient of the input costs more in stride 2 than the four maps save.
        in_turn = not (torch.is_grad_enabled() and input.requires_grad)
        if in_turn:
            shifted = [F.pad(self.weight, (right, 1 - right, down, 1 - down)) for down in (0, 1) for right in (0, 1)]
            maps = F.conv2d(input, torch.cat(shifted), self.bias.repeat(4), stride=2)
        else:
            maps = super().forward(input)
            maps = maps[..., : maps.shape[2] // 2 * 2, : maps.shape[3] // 2 * 2]
        pooled: torch.Tensor = Maximum.apply(maps, in_turn)  # type: ignore[no-untyped-call]
        return pooled
