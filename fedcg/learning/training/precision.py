"""Training in bfloat16 where that is safe: matrix products and convolutions of forward and backward passes.

Weights, optimisers, losses, batch norm's statistics and discriminators (spectral norm) stay in float32: what a network is asked for
comes back in float32, and autocast keeps the sensitive operations inside it there. The results are others in the third digit,
so they are used only on request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedcg.learning.method import RoundContext

Network = Callable[..., torch.Tensor]


def in_precision(network: nn.Module, ctx: RoundContext) -> Network:
    """A network (no discriminator) as a training step of this round is to run it; answers in float32."""
    if ctx.precision == "f32":
        return network
    device = torch.device(ctx.device).type

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        # A cast weight that was kept from one step to the next would be an old one: a CUDA graph would replay it.
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            output: torch.Tensor = network(*inputs)
        return output.float()

    return run
