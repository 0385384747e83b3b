"""Probe images: discs over noise, drawn from a secret, with nothing of anybody's data in them.

Dead leaves (Lee, Mumford & Huang 2001) over 1/f noise have the edges and the scales of photographs (Baradad et al. 2021), so an extractor
says about as much of itself on them as on real images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm

LEAVES = 24
SMALLEST, LARGEST = 0.08, 0.5
"""Radii of the discs, as shares of the longer side; their density falls with the third power."""
_TEXTURE = 0.35


def probe_images(streams: Streams, count: int, form: ImageForm) -> torch.Tensor:
    """Images that all who hold a secret draw alike.

    Args:
        streams: of the cohort's secret.
        count: how many.
        form: of the federation's images.

    Returns:
        [count, C, H, W] uint8.
    """
    stream = streams.generator("probes")
    size = count, form.channels, form.height, form.width
    images, texture = _noise(size, stream), _noise(size, stream)
    for _ in range(LEAVES):
        disc, colour = _disc(size, stream), torch.rand(count, form.channels, 1, 1, generator=stream)
        leaf = colour + _TEXTURE * (texture - 0.5)
        images = torch.where(disc, leaf, images)
    return (255.0 * images).clamp(0.0, 255.0).round().to(torch.uint8)


def _noise(size: tuple[int, int, int, int], stream: torch.Generator) -> torch.Tensor:
    """Octaves of random grids, each of half the amplitude of the coarser one; every image from 0 to 1."""
    count, channels, height, width = size
    total, cells, weight = torch.zeros(size), 2, 1.0
    while cells <= max(height, width):
        grid = torch.rand(count, channels, cells, cells, generator=stream)
        total += weight * F.interpolate(grid, (height, width), mode="bilinear", align_corners=False)
        cells, weight = 2 * cells, weight / 2
    low, high = (bound(total, (1, 2, 3), keepdim=True) for bound in (torch.amin, torch.amax))
    return (total - low) / (high - low)


def _disc(size: tuple[int, int, int, int], stream: torch.Generator) -> torch.Tensor:
    """One disc per image, [N, 1, H, W] bool."""
    count, _, height, width = size
    side = max(height, width)
    drawn = torch.rand(3, count, 1, 1, 1, generator=stream)
    radius = SMALLEST / torch.sqrt(1.0 - drawn[0] * (1.0 - (SMALLEST / LARGEST) ** 2))
    down = (torch.arange(height).view(-1, 1) / side - drawn[1] * height / side).square()
    across = (torch.arange(width).view(1, -1) / side - drawn[2] * width / side).square()
    return down + across < radius.square()
