"""Random numbers of layers: initial weights from an explicit stream, and torch's default generators seeded for a stage.

Layers such as dropout use only torch's default generator of the device. It is seeded from the stage's stream and
restored afterwards. A layer without known initial values is an error, because its tensors would stay uninitialised.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.method import RoundContext


@contextmanager
def seeded_layers(ctx: RoundContext, *purpose: object) -> Iterator[None]:
    """Within the block, layers that draw random numbers draw from the stream (`purpose`, "layers") of the round.

    Every stage that runs a network in train mode uses such a block, for any layers: a user's network can draw anywhere
    in its forward pass. It costs a few microseconds per stage.
    """
    with lent_generators(ctx.streams.seed(*purpose, "layers"), ctx.device):
        yield


@contextmanager
def lent_generators(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seed torch's default generators, of the CPU and of `device`, and restore their states afterwards.

    Not thread-safe: the default generators belong to the whole process.
    """
    place = torch.device(device)
    lent = [torch.cuda.current_device() if place.index is None else place.index] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=lent):
        # Not torch.manual_seed, which would seed every GPU.
        torch.default_generator.manual_seed(seed)
        for index in lent:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


# torch layers whose reset draws nothing: weight 1, bias 0, running mean 0, running variance 1, no batches counted.
_CONSTANT = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.PReLU)  # noqa: SLF001 - no public name


@runtime_checkable
class DrawsItself(Protocol):
    """A layer that fills its own tensors from a stream."""

    def reset(self, generator: torch.Generator) -> None:
        """Fill all tensors of the layer itself, including buffers."""


def draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Fill a module with initial weights from one stream, in module order.

    Linear and (transposed) convolution: U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases. Embedding: N(0, 1).
    Norm layers: weight 1, bias 0, mean 0, variance 1. Layers with their own `reset` (spectral norm's singular vectors)
    use it.

    Raises:
        NetworkError: a layer has tensors that nothing here fills.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):  # noqa: SLF001 - the base of all convolutions
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            # Drawn in the order of the shape, independent of the weight's memory order.
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
            f"no known initial values for {', '.join(held)} of the layer {name or '(the network itself)'} "
            f"({type(layer).__name__}): add a method reset(generator) that fills them"
        )
