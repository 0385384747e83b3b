"""Several networks of one architecture as one: their weights stacked, each on rows of its own, in one pass.

Convolutions become grouped convolutions, linear layers batched matrix products: on a GPU a step of ten small networks costs about as
many kernels as one. (On a CPU grouped convolutions are slower than one network after the other.) Networks never see each other's
rows, so that one which diverges leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from fedcg.learning.networks.layers.pooled import AveragedConv2d, MaxedConv2d

_Weights = Mapping[str, torch.Tensor]
_Layer = Callable[[nn.Module, torch.Tensor, _Weights], torch.Tensor]


def _convolved(rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    """[N, B, C, H, W] by N convolutions -> [B, N * outputs, H', W']."""
    networks, batch = rows.shape[:2]
    maps = rows.transpose(0, 1).reshape(batch, -1, *rows.shape[3:])
    convolved: torch.Tensor = F.conv2d(
        maps, weights["weight"].flatten(0, 1), weights["bias"].flatten(), groups=networks
    )
    return convolved


def _apart(maps: torch.Tensor, networks: int) -> torch.Tensor:
    """[B, N * C, H, W] -> [N, B, C, H, W], a view."""
    apart: torch.Tensor = maps.reshape(len(maps), networks, -1, *maps.shape[2:]).transpose(0, 1)
    return apart


def _averaged(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return _apart(F.avg_pool2d(_convolved(rows, weights), 2), len(rows))


def _maxed(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return _apart(F.max_pool2d(_convolved(rows, weights), 2), len(rows))


def _linear(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return torch.baddbmm(weights["bias"].unsqueeze(1), rows, weights["weight"].transpose(1, 2))


def _flat(_: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    return rows.flatten(2)


def _as_it_is(layer: nn.Module, rows: torch.Tensor, weights: _Weights) -> torch.Tensor:
    applied: torch.Tensor = layer(rows)
    return applied


_LAYERS: Mapping[type[nn.Module], _Layer] = {
    AveragedConv2d: _averaged,
    MaxedConv2d: _maxed,
    nn.Linear: _linear,
    nn.Flatten: _flat,
    nn.Identity: _as_it_is,
    nn.ReLU: _as_it_is,
    nn.Sigmoid: _as_it_is,
}


def can_stack(*networks: nn.Module) -> bool:
    """Whether networks are chains of layers that `Stacked` knows."""
    return all(isinstance(network, nn.Sequential) and all(map(_is_known, network)) for network in networks)


def _is_known(layer: nn.Module) -> bool:
    return type(layer) in _LAYERS and getattr(layer, "bias", layer) is not None


class Stacked(nn.Module):
    """Networks of one architecture, with copies of their weights."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """`networks`: on one device, and `can_stack`."""
        super().__init__()
        self._names = [name for name, _ in networks[0].named_parameters()]
        self.stacks = nn.ParameterList(
            torch.stack([network.get_parameter(name).detach() for network in networks]) for name in self._names
        )
        named = dict(zip(self._names, self.stacks, strict=True))
        # A tuple, so that the layers do not count as this module's own.
        self._chain = tuple(
            (layer, _LAYERS[type(layer)], {key: named[f"{at}.{key}"] for key, _ in layer.named_parameters()})
            for at, layer in networks[0].named_children()
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Each network on its rows: [N, B, ...] -> [N, B, ...]."""
        for layer, apply, weights in self._chain:
            rows = apply(layer, rows, weights)
        return rows

    def weights_of(self, at: int) -> dict[str, torch.Tensor]:
        """A copy of one network's weights, on the device."""
        return {name: stack[at].detach().clone() for name, stack in zip(self._names, self.stacks, strict=True)}
