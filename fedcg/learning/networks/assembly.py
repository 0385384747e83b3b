"""Builds the networks that a spec names, their tensor layouts, and their initial weights.

Modules are built on torch's meta device, where nothing random happens, and then filled: with given weights (`load`), or with
weights drawn from one explicit stream (`draw_weights`). The global random state is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.discriminators import DISCRIMINATORS
from fedcg.learning.networks.generators import GENERATORS
from fedcg.learning.networks.spectral import SingularVectors
from fedcg.learning.networks.split import SPLITS, Split
from fedcg.learning.spec import ImageForm, NetworkChoice
from fedcg.wire.parts import Part, TensorLayout

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

_Entry = TypeVar("_Entry")
_DTYPES = {torch.float32: "float32", torch.int64: "int64"}


class NetworkSpec(Protocol):
    """What networks are built from; a `FederationSpec` and a `FederationPlan` both say it."""

    @property
    def network(self) -> NetworkChoice:
        """Which split, generator and discriminator."""

    @property
    def image(self) -> ImageForm:
        """Channels and size of an image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""


@dataclass(frozen=True)
class Networks:
    """The four networks of a client, as modules."""

    extractor: nn.Module
    classifier: nn.Module
    generator: nn.Module
    discriminator: nn.Module

    def part(self, part: Part) -> nn.Module:
        """The module of a part."""
        module: nn.Module = getattr(self, part.value)
        return module


def _named(registry: Mapping[str, _Entry], name: str, what: str) -> _Entry:
    try:
        return registry[name]
    except KeyError:
        raise NetworkError(f"no {what} named {name!r}; there are {', '.join(sorted(registry))}") from None


def split_of(spec: NetworkSpec) -> Split:
    """The split that a spec names.

    Raises:
        NetworkError: unknown name, or an image smaller than the split can take.
    """
    split = _named(SPLITS, spec.network.split, "split")
    if min(spec.image.height, spec.image.width) < split.smallest_side:
        raise NetworkError(
            f"{spec.network.split} needs images of at least {split.smallest_side}x{split.smallest_side}, "
            f"not {spec.image.height}x{spec.image.width}: choose a larger image height and width"
        )
    return split


def feature_shape(spec: NetworkSpec) -> tuple[int, ...]:
    """Shape of one feature h, found by a dry run of the extractor on one empty image.

    On the CPU: a forward pass on the meta device makes torch import 800 modules, 1.2 s in every process that builds networks.
    """
    split = split_of(spec)
    with torch.device("meta"):
        extractor = split.extractor(spec.image.channels)
    with torch.no_grad():
        image = torch.zeros(1, spec.image.channels, spec.image.height, spec.image.width)
        features = extractor.to_empty(device="cpu").eval()(image)
    return tuple(features.shape[1:])


def _skeleton(spec: NetworkSpec, part: Part) -> nn.Module:
    """A part on the meta device: shapes without values."""
    split, choice, classes = split_of(spec), spec.network, len(spec.classes)
    shape = feature_shape(spec)
    with torch.device("meta"):
        if part is Part.EXTRACTOR:
            return split.extractor(spec.image.channels)
        if part is Part.CLASSIFIER:
            return split.classifier(shape, classes)
        if part is Part.GENERATOR:
            build = _named(GENERATORS, choice.generator, "generator")
            return build(shape, classes, choice.noise_dim, split.feature_range)
        return _named(DISCRIMINATORS, choice.discriminator, "discriminator")(shape, classes)


def draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Fill a module with initial weights from one stream: torch's default distributions, in module order.

    Linear and (transposed) convolution: U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases. Embedding: N(0, 1). Batch
    norm: weight 1, bias 0, mean 0, variance 1. Spectral norm's singular vectors: random directions.
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, generator=generator)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the base of all batch norms has no other name
            layer.reset_parameters()
        elif isinstance(layer, SingularVectors):
            layer.reset(generator)


def build_part(spec: NetworkSpec, part: Part, generator: torch.Generator | None = None) -> nn.Module:
    """One part on the CPU, with initial weights from `generator` (a fixed stream when None: meant to be overwritten)."""
    module = _skeleton(spec, part).to_empty(device="cpu")
    draw_weights(module, generator or torch.Generator().manual_seed(0))
    return module


def build(spec: NetworkSpec) -> Networks:
    """All four networks on the CPU; load weights before use.

    Raises:
        NetworkError: an unknown name or an image too small for the split.
    """
    return Networks(**{part.value: build_part(spec, part) for part in Part})


def load_part(spec: NetworkSpec, part: Part, weights: Weights, device: str = "cpu") -> nn.Module:
    """One part with a COPY of the given weights, on a device.

    Raises:
        NetworkError: tensors missing, unexpected or of another shape.
    """
    module = _skeleton(spec, part).to_empty(device=device)
    try:
        module.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        raise NetworkError(f"the weights do not fit the {part.value}: {error}") from error
    return module


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a module's tensors on the CPU, parameters and buffers, in storage of its own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


def layout_of(weights: Weights) -> tuple[TensorLayout, ...]:
    """Names, element types and shapes of a part's tensors, sorted by name."""
    return tuple(
        TensorLayout.model_validate({"name": name, "dtype": _DTYPES[tensor.dtype], "shape": tuple(tensor.shape)})
        for name, tensor in sorted(weights.items())
    )


def layouts(spec: NetworkSpec, parts: frozenset[Part]) -> dict[Part, tuple[TensorLayout, ...]]:
    """Tensor layouts of some parts, from shapes alone: nothing is allocated."""
    return {part: layout_of(_skeleton(spec, part).state_dict()) for part in sorted(parts)}
