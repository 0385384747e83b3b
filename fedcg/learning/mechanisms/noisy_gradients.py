"""Gaussian noise on every gradient of every local step (FedCG table 2: "FedAvg (0.001)", "(0.1)", which are variances).

Without clipping it bounds nothing: it is there to be compared with, DP-SGD is the mechanism with a guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedcg.learning.method import RoundContext
from fedcg.learning.round_checkpoint import optimiser_state, restore_optimiser


class NoisyOptimiser(torch.optim.Optimizer):
    """Another optimiser, which sees every gradient with noise of a given standard deviation added."""

    def __init__(self, inner: torch.optim.Optimizer, deviation: float, stream: torch.Generator) -> None:
        # Not the base class's own: groups and state are the inner optimiser's.
        self._inner = inner
        self._deviation = deviation
        self._stream = stream
        self.param_groups, self.state = inner.param_groups, inner.state

    def kept(self) -> dict[str, torch.Tensor]:
        """Its state for a checkpoint."""
        return {**optimiser_state(self._inner), "stream": self._stream.get_state()}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Take the state of a checkpoint."""
        self._stream.set_state(kept["stream"])
        restore_optimiser(self._inner, {name: value for name, value in kept.items() if name != "stream"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on the noisy gradients.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("this optimiser takes no closure")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    noise = torch.randn(weight.grad.shape, generator=self._stream).to(weight.grad.device)
                    weight.grad.add_(noise, alpha=self._deviation)
        self._inner.step()


def with_gradient_noise(optimiser: torch.optim.Optimizer, ctx: RoundContext, *purpose: object) -> torch.optim.Optimizer:
    """The optimiser of a stage, with the round's `gradient_noise`; the very same one without."""
    if not ctx.privacy.gradient_noise:
        return optimiser
    return NoisyOptimiser(optimiser, ctx.privacy.gradient_noise, ctx.streams.generator(*purpose, "gradient noise"))
