"""A CUDA graph's behaviour on the CPU: a step's operations are recorded once, and replayed on the very same memory.

What a replay sees of the world is what a graph sees: its static inputs, and whatever tensors the recorded step happened to refer to.
A step that refers to a block's tensor past its inputs would go on training on the first block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operations whose result the host, or the shape of another result, waits for: forbidden while a CUDA graph is captured.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class ReplayedStep:
    """Stands for `cuda_graph.GraphedStep`."""

    made = 0
    eager = 0

    def __init__(
        self, step: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], rewind: Callable[[], None]
    ) -> None:
        type(self).made += 1
        self._step = step
        self._inputs = [tensor.clone() for tensor in inputs]
        step(*self._inputs)
        with _Recording() as recording:
            self._result = step(*self._inputs).detach()
        self._calls = recording.calls
        rewind()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Replay on these inputs; plainly where their shapes are others."""
        if any(mine.shape != given.shape for mine, given in zip(self._inputs, inputs, strict=True)):
            type(self).eager += 1
            return self._step(*inputs)
        with torch.no_grad():
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
            for call, args, kwargs, before in self._calls:
                again = call(*tree_map(_alias, args), **tree_map(_alias, kwargs))
                for then, now in zip(before, tree_leaves(again), strict=True):
                    if isinstance(then, torch.Tensor) and then.data_ptr() != now.data_ptr():
                        then.copy_(now)
        return self._result


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        call = (func, tree_map(_alias, args), tree_map(_alias, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.calls.append((*call, tree_leaves(tree_map(_alias, result))))
        return result


def _alias(value: object) -> object:
    """The same memory in a tensor of its own: an operation such as `squeeze_` changes a tensor's shape and not its memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value
