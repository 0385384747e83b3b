"""torch's optimisers without its compiler, and noise on their gradients.

`torch.optim` wraps its methods against compilation. The wrappers import `torch._dynamo` and sympy: 800 modules and 1.3
to 1.6 CPU seconds in every training process, although nothing here is compiled. The methods under the wrappers are the
same.
"""

import inspect
from collections.abc import Iterable
from typing import TypeVar

import torch

from fedcg.learning.method import TrainingParams

_Kind = TypeVar("_Kind", bound=type[torch.optim.Optimizer])
_GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def eager(kind: _Kind) -> _Kind:
    """Class decorator: an optimiser without the wrappers, whose `step` records no gradients."""
    for name in _GUARDED:
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    setattr(kind, "step", torch.no_grad()(inspect.unwrap(kind.step)))  # noqa: B010 - mypy refuses to assign a method
    return kind


@eager
class Adam(torch.optim.Adam):
    """`torch.optim.Adam`."""


@eager
class SGD(torch.optim.SGD):
    """`torch.optim.SGD`."""


def adam(
    parameters: Iterable[torch.Tensor], lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Adam with L2 weight decay (FedCG §4.1), fused: one kernel per step."""
    return Adam(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def task_optimiser(parameters: Iterable[torch.Tensor], params: TrainingParams) -> torch.optim.Optimizer:
    """The optimiser of extractor and classifier from the parameters."""
    if params.optimiser == "sgd":
        weights = list(parameters)
        fused = None if all(weight.device.type == "cpu" for weight in weights) else True
        return SGD(weights, lr=params.lr, weight_decay=params.weight_decay, fused=fused)
    return adam(parameters, params.lr, params.weight_decay)


@torch.no_grad()
def add_gradient_noise(optimiser: torch.optim.Optimizer, deviation: float, stream: torch.Generator) -> None:
    """Add Gaussian noise of a standard deviation to every gradient of an optimiser's weights.

    Used in FedCG table 2: "FedAvg (0.001)", "(0.1)", which are variances. Without clipping it gives no bound. It is for
    comparisons; DP-SGD is the mechanism with a guarantee.
    """
    for group in optimiser.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                noise = torch.randn(weight.grad.shape, generator=stream).to(weight.grad.device)
                weight.grad.add_(noise, alpha=deviation)
