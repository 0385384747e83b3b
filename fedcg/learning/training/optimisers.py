"""torch's optimisers without its compiler, and Adam for a training loop on a CPU.

`torch.optim` wraps its methods against compilation. The wrappers import `torch._dynamo` and sympy: 800 modules and 1.3
to 1.6 CPU seconds in every training process, although nothing here is compiled. The methods under the wrappers are the
same.

`torch.optim.Adam(fused=True)` copies every non-contiguous weight in and out at each step. For small networks its
overhead is as long as the kernel. `FusedAdam` passes weights in any dense memory order to the kernel as one block of
memory. Same arithmetic, same results.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from fedcg.learning.method import RoundContext, TrainingParams
from fedcg.learning.round_checkpoint import optimiser_state, restore_optimiser

_EPS = 1e-8  # torch's default
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
        """Clear the gradients."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on the existing gradients. Weights without a gradient, and their moments, are not changed.

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
    """A dense tensor's memory as a contiguous view, with dimensions ordered by stride."""
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


def adam(
    parameters: Iterable[torch.Tensor], lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Adam with L2 weight decay (FedCG §4.1), fused: one kernel per step."""
    weights = list(parameters)
    if _on_cpu(weights):
        return FusedAdam(weights, lr, betas, weight_decay)
    return Adam(weights, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def task_optimiser(parameters: Iterable[torch.Tensor], params: TrainingParams) -> torch.optim.Optimizer:
    """The optimiser of extractor and classifier from the parameters."""
    if params.optimiser == "sgd":
        weights = list(parameters)
        fused = None if _on_cpu(weights) else True
        return SGD(weights, lr=params.lr, weight_decay=params.weight_decay, fused=fused)
    return adam(parameters, params.lr, params.weight_decay)


class NoisyOptimiser(torch.optim.Optimizer):
    """Wraps an optimiser and adds noise of a given standard deviation to every gradient.

    Used in FedCG table 2: "FedAvg (0.001)", "(0.1)", which are variances. Without clipping it gives no bound. It is for
        comparisons; DP-SGD is the mechanism with a guarantee.
    """

    def __init__(self, inner: torch.optim.Optimizer, deviation: float, stream: torch.Generator) -> None:
        # Does not call the base class: groups and state belong to the inner optimiser.
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
        """Clear the gradients."""
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
    """The optimiser of a stage with the round's `gradient_noise`, or unchanged without noise."""
    if not ctx.privacy.gradient_noise:
        return optimiser
    return NoisyOptimiser(optimiser, ctx.privacy.gradient_noise, ctx.streams.generator(*purpose, "gradient noise"))


def _on_cpu(weights: Iterable[torch.Tensor]) -> bool:
    return all(weight.device.type == "cpu" for weight in weights)
