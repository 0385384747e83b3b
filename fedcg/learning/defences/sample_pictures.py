"""A picture of a few training images before and after a defence, for the owner of the device; it is private."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image

from fedcg.files import replace_durably
from fedcg.learning.defences.defence import SAMPLES_FILE

_SHOWN = 10
_SIDE = 96


def write_samples(folder: Path, labels: torch.Tensor, *columns: torch.Tensor) -> None:
    """Write `samples.png`: one line per image, the first of each class, with its forms side by side.

    Args:
        folder: private; made where there is none.
        labels: [N] int64.
        columns: forms of the same N images, each [N, C, H, W] uint8: real, generated and mixed, say.

    Raises:
        OSError: the file can't be written.
    """
    firsts = [int((labels == label).nonzero()[0]) for label in labels.unique()[:_SHOWN]]
    lines = torch.cat([torch.cat([column[row] for column in columns], dim=2) for row in firsts], dim=1)
    scale = max(1, _SIDE // columns[0].shape[-1])
    pixels = lines.permute(1, 2, 0).squeeze(2).numpy().repeat(scale, 0).repeat(scale, 1)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_durably(folder / SAMPLES_FILE, stream.getvalue())
