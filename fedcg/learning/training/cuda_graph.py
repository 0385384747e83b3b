"""Runs a training step as one CUDA graph, which launches hundreds of small kernels at once. Elsewhere the plain step runs.

A step is a function of static tensors: it reads its inputs, updates modules and optimisers in place, and returns a
tensor. Everything that differs between steps is an input. All other tensors must stay the same objects. A step must not
wait for the device (`.item()`) nor branch on values, because a replay would not repeat that. Random numbers may come
only from torch's default generator of the device, which replays support.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedcg.learning.round_checkpoint import optimiser_state, restore_optimiser

Step = Callable[..., torch.Tensor]

log = logging.getLogger(__name__)
_WARM_UP_STEPS = 3  # lazy initialisation of cuBLAS, cuDNN and the optimiser's state must not be part of the graph
LEAST_STEPS = 50  # for fewer, capturing does not pay off: it costs four steps plus the instantiation


def graphed(step: Step, modules: Sequence[nn.Module], optimisers: Sequence[torch.optim.Optimizer], steps: int) -> Step:
    """The step, run as a CUDA graph from its first call on if its inputs are on a CUDA device and the capture succeeds.

    Args:
        step: zero_grad(set_to_none=True), forward, loss, backward, optimiser steps; returns the loss.
        modules: all modules that the step changes.
        optimisers: of these modules, new or restored from a checkpoint.
        steps: number of calls; the plain step is used if a graph would not pay off.
    """
    return _OnFirstCall(step, modules, optimisers) if steps >= LEAST_STEPS else step


def on_cuda(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are on a CUDA device."""
    return all(tensor.is_cuda for tensor in inputs)


class _OnFirstCall:
    """A step that selects how it runs at its first call."""

    def __init__(self, step: Step, modules: Sequence[nn.Module], optimisers: Sequence[torch.optim.Optimizer]) -> None:
        self._step = step
        self._modules = modules
        self._optimisers = optimisers
        self._run: Step | None = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self._run is None:
            self._run = self._captured(inputs) if on_cuda(inputs) else self._step
        return self._run(*inputs)

    def _captured(self, inputs: Sequence[torch.Tensor]) -> Step:
        before, moments = _snapshot(self._modules), [optimiser_state(one) for one in self._optimisers]
        moments = [{name: value.clone() for name, value in state.items()} for state in moments]
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
        try:
            return GraphedStep(self._step, inputs, lambda: _restore(before, moments, self._modules, self._optimisers))
        except RuntimeError as error:
            log.warning("the training step runs without a CUDA graph: %s", error)
            _restore(before, moments, self._modules, self._optimisers)
            return self._step


class GraphedStep:
    """A captured step. Its result lies in static memory: use it before the next call.

    Args:
        step: as in `graphed`.
        inputs: example inputs, on one CUDA device; later ones must have the same types.
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
            try:
                with torch.cuda.stream(side):
                    for _ in range(_WARM_UP_STEPS):
                        step(*self._inputs)
                torch.cuda.current_stream(device).wait_stream(side)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=side):  # this stream already has its library handles
                    self._result = step(*self._inputs).detach()
            finally:  # also for the plain step after a failed capture
                torch.cuda.set_rng_state(random_state, device)
        rewind()  # capturing runs nothing, so only the warm-up is undone

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
    moments: Sequence[dict[str, torch.Tensor]],
    modules: Sequence[nn.Module],
    optimisers: Sequence[torch.optim.Optimizer],
) -> None:
    """Restore modules from the snapshot and optimisers as before the warm-up (new, or from a checkpoint), in the same tensors."""
    for weights, module in zip(before, modules, strict=True):
        for name, tensor in module.state_dict().items():
            tensor.copy_(weights[name])
    for kept, optimiser in zip(moments, optimisers, strict=True):
        for state in optimiser.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        restore_optimiser(optimiser, kept)
