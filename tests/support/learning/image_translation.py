"""Networks on whole images with values, and the embedded digits as a client's images."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from experiments.data.source import read_digits
from fedcg.learning.image_set import ImageSet
from fedcg.learning.methods.ppidsg import TranslationNetworks
from fedcg.learning.networks.assembly import allocated
from fedcg.learning.networks.image_networks import (
    ImageAutoencoder,
    Widths,
    image_discriminator,
    image_generator,
    image_split,
)
from fedcg.learning.networks.randomness import draw_weights

DIGITS = tuple("0123456789")


def built(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module as `assembly` makes it: on the meta device, then filled from one stream."""
    with torch.device("meta"):
        module = make()
    module = allocated(module, "cpu")
    draw_weights(module, torch.Generator().manual_seed(seed))
    return module


def networks_of(widths: Widths, size: tuple[int, int, int], classes: int, seed: int = 0) -> TranslationNetworks:
    """All four networks for images of one size (channels, height, width)."""
    channels, height, width = size
    split, shape = image_split(widths), (2 * widths.extractor, height // 4, width // 4)
    return TranslationNetworks(
        built(lambda: image_generator(channels, widths), seed),
        built(lambda: image_discriminator(channels, widths), seed + 1),
        cast("ImageAutoencoder", built(lambda: split.extractor(channels), seed + 2)),
        built(lambda: split.classifier(shape, classes), seed + 3),
    )


def digit_images(rows: slice, side: int) -> ImageSet:
    """Some of the 1,797 digits in an order without a pattern, side x side grey."""
    scans, labels = read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[rows]
    pixels = torch.from_numpy(scans)[order].unsqueeze(1).float()
    enlarged = F.interpolate(pixels, size=(side, side), mode="bilinear").round().to(torch.uint8)
    return ImageSet(enlarged, torch.from_numpy(labels)[order], DIGITS)
