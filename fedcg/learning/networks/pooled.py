"""A convolution and the 2x2 average pool after it in one: both are linear, so together they are one convolution of stride 2.

Its kernel is the mean of four copies of the kernel, shifted by one: 6x6 instead of 5x5, at a quarter of the positions. Same
function and same tensors as `nn.Conv2d` followed by `nn.AvgPool2d(2)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn


class AveragedConv2d(nn.Conv2d):
    """`nn.AvgPool2d(2)(nn.Conv2d(inputs, outputs, kernel)(images))`."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """[B, inputs, H, W] -> [B, outputs, (H - kernel + 1) // 2, (W - kernel + 1) // 2]."""
        # An exported graph has the two layers: kernels are constants there.
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
            return F.avg_pool2d(super().forward(input), 2)
        tall = F.pad(self.weight, (0, 0, 0, 1)) + F.pad(self.weight, (0, 0, 1, 0))
        wide = F.pad(tall, (0, 1)) + F.pad(tall, (1, 0))
        return F.conv2d(input, 0.25 * wide, self.bias, stride=2)
