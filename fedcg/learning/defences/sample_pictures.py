"""A picture of a few training images before and after a defence, for the owner of the device; it is private."""

from __future__ import annotations

import io

import torch
from PIL import Image

SHOWN = 10
_SIDE = 96


def sample_picture(labels: torch.Tensor, *columns: torch.Tensor) -> bytes:
    """A PNG: one line per image, the first of each class, with its forms side by side; empty without images.

    Args:
        labels: [N] int64.
        columns: forms of the same N images, each [N, C, H, W] uint8: real, generated and mixed, say.
    """
    if not len(labels):
        return b""
    firsts = [int((labels == label).nonzero()[0]) for label in labels.unique()[:SHOWN]]
    lines = torch.cat([torch.cat([column[row] for column in columns], dim=2) for row in firsts], dim=1)
    scale = max(1, _SIDE // columns[0].shape[-1])
    pixels = lines.permute(1, 2, 0).squeeze(2).numpy().repeat(scale, 0).repeat(scale, 1)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
