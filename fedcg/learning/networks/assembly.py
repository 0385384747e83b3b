"""Builds the networks of a spec, their tensor layouts, and the model that a client uses and serves.

Modules are built on torch's meta device, which draws no random numbers, and then filled: with given weights
(`load_part`), or with weights drawn from one explicit stream (`draw_weights`). A user's split is built on the CPU with
a seeded default generator of torch, which is restored afterwards. The global random state is never changed.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.gan import DISCRIMINATORS, build_generator
from fedcg.learning.networks.image_networks import IMAGE_SPLITS
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from fedcg.learning.networks.splits import SPLITS, Rehearsal, Split, load_split, program_split, rehearse
from fedcg.learning.networks.task import Task
from fedcg.learning.networks.timm_backbones import check_plain, projected_split
from fedcg.learning.registry import get_method
from fedcg.learning.spec import PROGRAM, TRAINER, FederationSpec, ImageForm, NetworkSpec
from fedcg.learning.split_names import is_projected
from fedcg.wire.parts import Part, TensorLayout

if TYPE_CHECKING:
    from fedcg.learning.method import Parts, Weights


_DTYPES = {torch.float32: "float32", torch.int64: "int64"}


NETWORKS = (Part.EXTRACTOR, Part.CLASSIFIER, Part.GENERATOR, Part.DISCRIMINATOR)
"""The parts that have a network in a spec."""


def split_of(spec: NetworkSpec) -> Split:
    """The split named in a spec. A user's split has been tested on random inputs of the spec's form.

    Raises:
        NetworkError: unknown or not allowed here, timm is missing, an input form that the split does not support, or a
            user's split that fails its test.
    """
    name, form = spec.network.split, spec.input
    if (is_projected(name) or name in IMAGE_SPLITS) and not isinstance(form, ImageForm):
        raise NetworkError(f"{name} needs images, not tensors of shape {list(form.tensor_shape)}")
    if is_projected(name):
        split = projected_split(spec.network, spec.image)
    elif name == TRAINER:
        return program_split(spec.network)
    elif name == PROGRAM:
        split = program_split(spec.network)
    else:
        check_plain(spec.network)
        split = SPLITS.get(name) or IMAGE_SPLITS.get(name) or load_split(name)
    if len(form.tensor_shape) != 3 and name != PROGRAM and not split.initialises_itself:
        raise NetworkError(f"{name} needs inputs with three dimensions, not of shape {list(form.tensor_shape)}")
    sides = form.tensor_shape[1:]
    if min(sides, default=split.smallest_side) < split.smallest_side:
        raise NetworkError(
            f"{name} needs images of at least {split.smallest_side}x{split.smallest_side}, "
            f"not {'x'.join(map(str, sides))}: choose a larger image height and width"
        )
    if split.initialises_itself:
        rehearse(split, Rehearsal(name, form.tensor_shape, len(spec.classes)))
    return split


def feature_shape(spec: NetworkSpec) -> tuple[int, ...]:
    """Shape of one feature h, from a dry run of the extractor on an input of zeros, once per split and shape."""
    split = split_of(spec)
    return split.features or _feature_shape(split, spec.input.tensor_shape)


@functools.lru_cache(maxsize=64)
def _feature_shape(split: Split, shape: tuple[int, ...]) -> tuple[int, ...]:
    # On the CPU: a forward pass on the meta device makes torch import 800 modules (1.2 s per process).
    if split.initialises_itself:
        with lent_generators(0):
            extractor = split.extractor(shape[0])
    else:
        with torch.device("meta"):
            extractor = split.extractor(shape[0])
        extractor = allocated(extractor, "cpu")
    with torch.no_grad():
        features = extractor.eval()(torch.zeros(1, *shape))
    return tuple(features.shape[1:])


def skeleton(spec: NetworkSpec, part: Part) -> nn.Module:
    """A part on the meta device, without values. Half of a user's split is on the CPU, with its own values."""
    split, choice, classes = split_of(spec), spec.network, len(spec.classes)
    shape = feature_shape(spec)
    with torch.device("cpu" if _fills_itself(split, part) else "meta"):
        if part is Part.EXTRACTOR:
            return split.extractor(spec.input.channels)
        if part is Part.CLASSIFIER:
            return split.classifier(shape, classes)
        if part is Part.IMAGE_GENERATOR:
            if split.image_generator is None:
                raise NetworkError(
                    f"network.split = {choice.split} has no image generator; splits with one: {', '.join(IMAGE_SPLITS)}"
                )
            return split.image_generator(spec.image.channels)
        if part is Part.GENERATOR:
            return build_generator(choice.generator, (shape, classes, choice.noise_dim, split.feature_range))
        if choice.discriminator not in DISCRIMINATORS:
            known = ", ".join(sorted(DISCRIMINATORS))
            raise NetworkError(f"no discriminator {choice.discriminator!r}; choose from {known}")
        return DISCRIMINATORS[choice.discriminator](shape, classes)


def allocated(module: nn.Module, device: str) -> nn.Module:
    """Move a module from the meta device to uninitialised memory of `device`, in the same memory format."""

    # Not `to_empty`: its `empty_like` of a meta tensor makes torch import sympy (0.4 s per process).
    def memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    module._apply(memory)  # noqa: SLF001 - the basis of `to_empty`, `to` and `float`; it works in place
    return module


def _fills_itself(split: Split, part: Part) -> bool:
    own = {Part.EXTRACTOR} if split.draws_classifier else {Part.EXTRACTOR, Part.CLASSIFIER}
    return split.initialises_itself and part in own


def _made(spec: NetworkSpec, part: Part, device: str, stream: torch.Generator | None) -> nn.Module:
    """A part on a device with initial weights from a stream.

    None: the weights will be overwritten. Constants, and values that a user's module computes when built, are kept.
    """
    split = split_of(spec)
    if _fills_itself(split, part):
        with lent_generators(0 if stream is None else int(torch.randint(1 << 62, (), generator=stream))):
            return skeleton(spec, part).to(device)
    module = allocated(skeleton(spec, part), device)
    if part is Part.EXTRACTOR and split.fill is not None:
        split.fill(module, stream)
    elif stream is not None:
        draw_weights(module, stream)
    return module


def build_part(spec: NetworkSpec, part: Part, generator: torch.Generator | None = None) -> nn.Module:
    """One part on the CPU, with initial weights from `generator` (None: a fixed stream, for weights that will be overwritten).

    Raises:
        NetworkError: unknown name, or an input form that the split does not support.
    """
    return _made(spec, part, "cpu", generator or torch.Generator().manual_seed(0))


def load_part(spec: NetworkSpec, part: Part, weights: Weights, device: str = "cpu") -> nn.Module:
    """One part with a COPY of the given weights, on a device.

    Raises:
        NetworkError: tensors are missing, unexpected or of another shape.
    """
    module = _made(spec, part, device, None)
    try:
        module.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        raise NetworkError(f"the weights do not fit the {part.value}: {error}") from error
    return module


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a module's parameters and buffers on the CPU, in its own storage."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module.state_dict().items()}


def layout_of(weights: Weights) -> tuple[TensorLayout, ...]:
    """Names, element types and shapes of a part's tensors, sorted by name."""
    return tuple(
        TensorLayout.model_validate({"name": name, "dtype": _DTYPES[tensor.dtype], "shape": tuple(tensor.shape)})
        for name, tensor in sorted(weights.items())
    )


def layouts(spec: NetworkSpec, parts: frozenset[Part]) -> dict[Part, tuple[TensorLayout, ...]]:
    """Tensor layouts of some parts, from shapes alone, without allocation."""
    own, choice = spec.network.starts_on_devices, spec.network
    stated = {part: (choice.extractor if part is Part.EXTRACTOR else choice.head) or () for part in own}
    with lent_generators(0):
        return {
            part: stated[part] if part in stated else layout_of(skeleton(spec, part).state_dict())
            for part in sorted(parts)
        }


def personal_model(
    spec: FederationSpec, parts: Parts, device: str = "cpu", before: nn.Module | None = None
) -> nn.Module:
    """A client's model in evaluation mode, with a copy of the weights.

    Args:
        spec: names the method.
        parts: those of the method's `personal`; others are ignored.
        device: torch device string.
        before: a data defence's input layer for real images, normalised in and out.

    Returns:
        From inputs [B, *tensor_shape] float32, normalised, to logits [B, classes].

    Raises:
        NetworkError: weights that do not fit the spec's networks.
    """
    method, task = get_method(spec.method), spec.network.task
    if isinstance(task, Task):
        model = task.model(parts)
    elif method.personal.predict is not None:
        model = method.personal.predict(spec, parts)
    else:
        halves = (Part.EXTRACTOR, Part.CLASSIFIER)
        model = nn.Sequential(OrderedDict((part.value, load_part(spec, part, parts[part], device)) for part in halves))
    return (model if before is None else nn.Sequential(before, model)).to(device).eval()


def personal_parts(spec: FederationSpec, parts: Parts) -> dict[Part, Weights]:
    """The parts of the client's personal model."""
    return {part: parts[part] for part in sorted(get_method(spec.method).personal.parts)}
