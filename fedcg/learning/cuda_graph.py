"""A training step as one CUDA graph: hundreds of small kernels are launched at once. Everywhere else the step runs as it is.

A step is a function of static tensors: it reads its inputs, updates modules and optimisers in place, and returns a tensor. It
must not wait for the device (`.item()`) nor branch on values: a replay would not do so again. Random numbers may come from
torch's default generator of the device alone, which replays know of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

Step = Callable[..., torch.Tensor]

log = logging.getLogger(__name__)
_WARM_UP_STEPS = 3  # lazy initialisation of cuBLAS, cuDNN and the optimiser's state must not end up in the graph


def graphed(
    step: Step,
    inputs: Sequence[torch.Tensor],
    modules: Sequence[nn.Module],
    optimisers: Sequence[torch.optim.Optimizer],
) -> Step:
    """The step under a CUDA graph where its inputs are on a CUDA device; the plain step anywhere else, or when capturing fails.

    Args:
        step: zero_grad(set_to_none=True), forward, loss, backward, optimiser steps; returns the loss.
        inputs: examples of the step's inputs; later ones have the same shapes and types.
        modules: all that the step changes. They are as they were when this returns.
        optimisers: of these modules, without a step behind them.
    """
    if not all(tensor.is_cuda for tensor in inputs):
        return step
    before = _snapshot(modules)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["capturable"] = True
    try:
        return GraphedStep(step, inputs, lambda: _restore(before, modules, optimisers))
    except RuntimeError as error:
        log.warning("the training step runs without a CUDA graph: %s", error)
        _restore(before, modules, optimisers)
        return step


class GraphedStep:
    """A captured step. Its result lies in static memory: use it before the next call.

    Args:
        step: as in `graphed`.
        inputs: examples of its inputs, on one CUDA device.
        rewind: undoes the warm-up steps, in place.

    Raises:
        RuntimeError: the step can't be captured.
    """

    def __init__(self, step: Step, inputs: Sequence[torch.Tensor], rewind: Callable[[], None]) -> None:
        self._step = step
        self._inputs = [tensor.clone() for tensor in inputs]
        device = self._inputs[0].device
        with torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            random_state = torch.cuda.get_rng_state(device)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_STEPS):
                    step(*self._inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):  # the stream whose library handles exist by now
                self._result = step(*self._inputs).detach()
            torch.cuda.set_rng_state(random_state, device)
        rewind()  # capturing runs nothing: only the warm-up is to be undone

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """One step on these inputs; inputs of other shapes (an epoch's last batch) run without the graph."""
        if any(mine.shape != given.shape for mine, given in zip(self._inputs, inputs, strict=True)):
            return self._step(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._graph.replay()
        return self._result


def _snapshot(modules: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.detach().clone() for name, tensor in module.state_dict().items()} for module in modules]


@torch.no_grad()
def _restore(
    before: Sequence[dict[str, torch.Tensor]],
    modules: Sequence[nn.Module],
    optimisers: Sequence[torch.optim.Optimizer],
) -> None:
    """Modules as in the snapshot, optimisers as before their first step; every tensor stays where the graph knows it."""
    for weights, module in zip(before, modules, strict=True):
        for name, tensor in module.state_dict().items():
            tensor.copy_(weights[name])
    for optimiser in optimisers:
        for state in optimiser.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
