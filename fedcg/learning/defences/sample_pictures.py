"""A picture of a few training images before and after a defence, for the owner of the device. It is private."""

import io
from collections.abc import Mapping

import torch
from PIL import Image

from fedcg.learning.defences.defence import Defended
from fedcg.learning.image_set import ImageSet

SHOWN = 10
_SIDE = 96


def shown(real: ImageSet, facts: Mapping[str, str], *forms: torch.Tensor) -> Defended:
    """Defended images with a PNG: one row per image, the first of each class, with its forms side by side.

    Args:
        real: the images before the defence.
        facts: how the defended images were produced.
        forms: forms of the same images, each [N, C, H, W] uint8; the last one replaces the real images.
    """
    labels, columns = real.labels, (real.images, *forms)
    done = ImageSet(forms[-1], labels, real.classes)
    if not len(real):
        return Defended(done, facts, b"")
    firsts = [int((labels == label).nonzero()[0]) for label in labels.unique()[:SHOWN]]
    lines = torch.cat([torch.cat([column[row] for column in columns], dim=2) for row in firsts], dim=1)
    scale = max(1, _SIDE // columns[0].shape[-1])
    pixels = lines.permute(1, 2, 0).squeeze(2).numpy().repeat(scale, 0).repeat(scale, 1)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return Defended(done, facts, stream.getvalue())
