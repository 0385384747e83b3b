"""torch's optimisers without its compiler, which they import at their first use although nothing here is compiled.

`torch.optim` guards its methods against being compiled by wrappers that import `torch._dynamo`, and with it sympy: 800 modules and
1.3 to 1.6 CPU seconds in every process that trains. The methods below the wrappers are the same ones.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

_Kind = TypeVar("_Kind", bound=type[torch.optim.Optimizer])
_GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def eager(kind: _Kind) -> _Kind:
    """Class decorator: an optimiser of our own without the guards, in which `step` records no gradients."""
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
