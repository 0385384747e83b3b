"""What a choice of networks costs: parameters per part, and bytes that each method sends. Nothing is trained or filled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedcg.learning.networks.assembly import NETWORKS, feature_shape, layouts, skeleton, split_of
from fedcg.learning.networks.initial_weights import method_layouts
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import NetworkSpec
from fedcg.wire.parts import Part, TensorLayout

_ITEM_BYTES = {"float32": 4, "int64": 8}


@dataclass(frozen=True)
class PartSize:
    """One part.

    Attributes:
        parameters: how many numbers are trained.
        parameter_bytes: those as float32.
        tensor_bytes: all tensors, buffers such as batch norm's among them, as the wire carries them without compression.
    """

    parameters: int
    parameter_bytes: int
    tensor_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of tensors that one client sends and gets in a round of a method, before compression."""

    up: int
    down: int


@dataclass(frozen=True)
class Sizes:
    """The sizes of a choice of networks for one form of image.

    Attributes:
        feature_shape: of one image's features.
        feature_range: "unit" or "non_negative".
        smallest_side: the least height and width of an image that the split takes.
        parts: per part.
        methods: per method that can work with these networks, by name.
        refusals: why the other methods can't, by name.
    """

    feature_shape: tuple[int, ...]
    feature_range: str
    smallest_side: int
    parts: dict[Part, PartSize]
    methods: dict[str, Traffic]
    refusals: dict[str, str]


def sizes_of(spec: NetworkSpec) -> Sizes:
    """The sizes that follow from a plan or spec.

    Raises:
        NetworkError: networks that can't be built for this form of image.
    """
    split = split_of(spec)
    own = frozenset() if split.image_generator is None else frozenset({Part.IMAGE_GENERATOR})
    parts = {part: _size(spec, part, tensors) for part, tensors in layouts(spec, own.union(NETWORKS)).items()}
    methods, refusals = {}, {}
    for name in method_names():
        method = get_method(name)
        if problem := method.needs.networks(spec):
            refusals[name] = problem
            continue
        tensors = method_layouts(spec, method)
        methods[name] = Traffic(*(_total(tensors, shared) for shared in (method.payload.up, method.payload.down)))
    return Sizes(feature_shape(spec), split.feature_range.value, split.smallest_side, parts, methods, refusals)


def _size(spec: NetworkSpec, part: Part, tensors: tuple[TensorLayout, ...]) -> PartSize:
    parameters = sum(parameter.numel() for parameter in skeleton(spec, part).parameters())
    return PartSize(parameters, 4 * parameters, _bytes(tensors))


def _total(tensors: Mapping[Part, tuple[TensorLayout, ...]], shared: frozenset[Part]) -> int:
    return sum(_bytes(tensors[part]) for part in shared)


def _bytes(tensors: tuple[TensorLayout, ...]) -> int:
    return sum(_ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors)
