"""A classifier of standard layers as data. A device describes its own, and others build it from the spec without its code.

The data does not include weights, which are drawn as for built-in classifiers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.spec import Layer

_MOST_PARAMETERS = 1 << 26
"""256 MB of float32. A limit, because specs are untrusted input."""
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
_BATCH_NORM = ("num_features", "eps", "affine", "track_running_stats")  # momentum: torch's default
_POOL = ("kernel_size", "stride", "padding")
_KINDS: Mapping[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "linear": (nn.Linear, ("in_features", "out_features", "bias")),
    "conv1d": (nn.Conv1d, _CONVOLUTION),
    "conv2d": (nn.Conv2d, _CONVOLUTION),
    "batch_norm1d": (nn.BatchNorm1d, _BATCH_NORM),
    "batch_norm2d": (nn.BatchNorm2d, _BATCH_NORM),
    "group_norm": (nn.GroupNorm, ("num_groups", "num_channels", "eps", "affine")),
    "layer_norm": (nn.LayerNorm, ("normalized_shape", "eps", "elementwise_affine", "bias")),
    "relu": (nn.ReLU, ()),
    "leaky_relu": (nn.LeakyReLU, ("negative_slope",)),
    "gelu": (nn.GELU, ()),
    "silu": (nn.SiLU, ()),
    "sigmoid": (nn.Sigmoid, ()),
    "tanh": (nn.Tanh, ()),
    "max_pool1d": (nn.MaxPool1d, _POOL),
    "max_pool2d": (nn.MaxPool2d, _POOL),
    "avg_pool1d": (nn.AvgPool1d, _POOL),
    "avg_pool2d": (nn.AvgPool2d, _POOL),
    "adaptive_avg_pool1d": (nn.AdaptiveAvgPool1d, ("output_size",)),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d, ("output_size",)),
    "flatten": (nn.Flatten, ("start_dim", "end_dim")),
    "dropout": (nn.Dropout, ("p",)),
}
_NAMES = {module: kind for kind, (module, _) in _KINDS.items()}
_PLAIN = {
    "padding_mode": "zeros",
    "approximate": "none",
    "momentum": 0.1,
    "dilation": 1,
    "ceil_mode": False,
    "count_include_pad": True,
    "return_indices": False,
}
"""Attributes that a description does not include. A layer with another value can't be described."""


def described(module: nn.Module) -> tuple[Layer, ...] | None:
    """A module as data, if it is a standard layer or a sequence of them; None for any other."""
    if type(module) is nn.Identity:
        return ()
    if type(module) is nn.Sequential:
        parts = [described(one) for one in module]
        known = [part for part in parts if part is not None]
        return tuple(layer for part in known for layer in part) if len(known) == len(parts) else None
    kind = _NAMES.get(type(module))
    if kind is None:
        return None
    arguments = _KINDS[kind][1]
    if any(getattr(module, name, plain) != plain for name, plain in _PLAIN.items() if name not in arguments):
        return None
    try:
        return (Layer(kind=kind, args=dict(_values(module, arguments))),)
    except ValueError:  # numbers beyond a spec's limits, or a padding by name
        return None


def _values(module: nn.Module, arguments: Sequence[str]) -> Iterator[tuple[str, object]]:
    for name in arguments:
        value = getattr(module, name)
        yield name, value is not None if name == "bias" else tuple(value) if isinstance(value, (tuple, list)) else value


def built(layers: Sequence[Layer]) -> nn.Sequential:
    """Build the classifier from layers, in the caller's device context.

    Raises:
        NetworkError: names the layer that can't be built and the reason.
    """
    parts: list[nn.Module] = []
    with torch.device("meta"):  # sizes are checked before allocation
        for number, layer in enumerate(layers, 1):
            parts.append(_layer(layer, f"network.classifier: layer {number}, {layer.kind}"))
    count = sum(math.prod(one.shape) for part in parts for one in part.parameters())
    if count > _MOST_PARAMETERS:
        raise NetworkError(f"network.classifier has {count:,} parameters; the limit is {_MOST_PARAMETERS:,}")
    return nn.Sequential(*(_KINDS[layer.kind][0](**layer.args) for layer in layers))


def _layer(layer: Layer, where: str) -> nn.Module:
    if layer.kind not in _KINDS:
        raise NetworkError(f"{where}: unknown layer; choose from {', '.join(_KINDS)}")
    module, arguments = _KINDS[layer.kind]
    if unknown := sorted(layer.args.keys() - set(arguments)):
        raise NetworkError(f"{where}: no argument {', '.join(unknown)}; it accepts {', '.join(arguments) or 'none'}")
    try:
        return module(**layer.args)
    except Exception as error:
        raise NetworkError(f"{where}: {type(error).__name__}: {error}") from error
