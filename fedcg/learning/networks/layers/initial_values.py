"""Initial weights of modules that were made without values: torch's default distributions, drawn from one explicit stream.

A layer that is not known here is an error. A tensor left alone would hold whatever the memory held before: no seed repeats it.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fedcg.learning.errors import NetworkError

# torch's layers whose own reset draws nothing: weight 1, bias 0, running mean 0, running variance 1, no batches seen.
_CONSTANT = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.PReLU)  # noqa: SLF001 - torch has no other name


@runtime_checkable
class DrawsItself(Protocol):
    """A layer that knows how to fill its own tensors from a stream."""

    def reset(self, generator: torch.Generator) -> None:
        """Fill every tensor that the layer itself holds, buffers among them."""


def draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Fill a module with initial weights from one stream, in module order.

    Linear and (transposed) convolution: U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases. Embedding: N(0, 1). Norm
    layers: weight 1, bias 0, mean 0, variance 1. Layers with a `reset` of their own (spectral norm's singular vectors): that.

    Raises:
        NetworkError: a layer holds tensors and nothing here fills them.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):  # noqa: SLF001 - the base of all convolutions
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            # Drawn in the order of the shape, whatever the memory order of the weight.
            drawn = torch.empty(layer.weight.shape).uniform_(-bound, bound, generator=generator)
            layer.weight.data.copy_(drawn)
            if layer.bias is not None:
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, generator=generator)
        elif isinstance(layer, _CONSTANT):
            layer.reset_parameters()
        elif isinstance(layer, DrawsItself):
            layer.reset(generator)
        else:
            _refuse_tensors(name, layer)


def _refuse_tensors(name: str, layer: nn.Module) -> None:
    held = [*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers(recurse=False))]
    if held:
        raise NetworkError(
            f"no initial values are known for {', '.join(held)} of the layer {name or '(the network itself)'} "
            f"({type(layer).__name__}): give it a method reset(generator) that fills them"
        )
