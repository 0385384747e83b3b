"""Training in bfloat16 where that is safe: matrix products and convolutions of forward and backward passes.

Weights, optimisers, losses, batch norm's statistics and discriminators (spectral norm) stay in float32: what a network is asked for
comes back in float32, and autocast keeps the sensitive operations inside it there. The results are others in the third digit,
so they are used only on request.
"""

from __future__ import annotations

import torch
from torch import nn

from fedcg.learning.method import RoundContext


def in_precision(network: nn.Module, ctx: RoundContext) -> nn.Module:
    """A network (no discriminator) as a training step of this round is to run it; answers in float32."""
    return network if ctx.machine.precision == "f32" else _InBfloat16(network, torch.device(ctx.device).type)


class _InBfloat16(nn.Module):
    def __init__(self, network: nn.Module, device: str) -> None:
        super().__init__()
        self.network, self._device = network, device

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # A cast weight that was kept from one step to the next would be an old one: a CUDA graph would replay it.
        with torch.autocast(self._device, torch.bfloat16, cache_enabled=False):
            output: torch.Tensor = self.network(*inputs)
        return output.float()
