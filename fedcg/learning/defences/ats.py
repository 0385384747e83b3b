"""ATS (Gao et al., CVPR 2021): training images transformed by a policy that makes gradients hard to invert. Torch-free.

The paper's search ranks policies (lists of three of 50 transformations) on a model trained for it. Here the policies
are fixed to those published: for CIFAR-100 and ResNet-20 3-1-7 and 43-18-18, for F-MNIST 21-13-3 and 7-4-15. By default each image gets one of the two
at random, as in the paper's hybrid. A search per device would train longer than the federation, and PPIDSG's tables
also use ATS as a fixed baseline. Images are transformed once, not in every epoch, so training uses a single form of
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, ImageEnhance

from fedcg.learning.defences.defence import Defence, DefencePlace, Defended
from fedcg.learning.defences.params import DefenceParams

if TYPE_CHECKING:
    from fedcg.learning.image_set import ImageSet

Transformation = Callable[[Image.Image, int], Image.Image]
_FARTHEST = 150 / 331  # of a side, at magnitude 9, as in AutoAugment
_MOST_CHANGE = 0.5  # of contrast, brightness and sharpness


class AtsParams(DefenceParams):
    """Parameters: a published hybrid policy, or one of the two policies for colour images."""

    policy: Literal["3-1-7+43-18-18", "3-1-7", "43-18-18", "21-13-3+7-4-15"] = "3-1-7+43-18-18"


def _translated(horizontal: int, vertical: int) -> Transformation:
    """A shift in either direction by a magnitude of 0 to 9, filled with black."""

    def transform(image: Image.Image, sign: int) -> Image.Image:
        right, down = (
            sign * magnitude / 9 * _FARTHEST * side
            for magnitude, side in zip((horizontal, vertical), image.size, strict=True)
        )
        return image.transform(image.size, Image.Transform.AFFINE, (1, 0, right, 0, 1, down))

    return transform


def _enhanced(by: Callable[[Image.Image], ImageEnhance._Enhance], magnitude: int) -> Transformation:
    return lambda image, sign: by(image).enhance(1 + sign * magnitude / 9 * _MOST_CHANGE)


# Indexed by their number in the authors' list.
TRANSFORMATIONS: Mapping[str, Transformation] = {
    "1": _enhanced(ImageEnhance.Contrast, 6),
    "3": _translated(9, 0),
    "4": _enhanced(ImageEnhance.Sharpness, 1),
    "7": _translated(0, 2),
    "13": _enhanced(ImageEnhance.Brightness, 5),
    "15": _enhanced(ImageEnhance.Brightness, 9),
    "18": _enhanced(ImageEnhance.Contrast, 7),
    "21": _translated(5, 0),
    "43": _translated(0, 3),
}


def _apply(images: ImageSet, params: AtsParams, place: DefencePlace) -> Defended:
    import torch  # not needed to read a configuration

    from fedcg.learning.defences.sample_pictures import shown

    policies = [policy.split("-") for policy in params.policy.split("+")]
    done = images.images.clone()
    for row, pixels in enumerate(images.images.permute(0, 2, 3, 1)):
        draws = place.draws("ats", pixels)
        policy = policies[int(torch.randint(len(policies), (), generator=draws))]
        signs = (2 * torch.randint(2, (len(policy),), generator=draws) - 1).tolist()
        image = Image.fromarray(pixels.squeeze(2).numpy())
        for name, sign in zip(policy, signs, strict=True):
            image = TRANSFORMATIONS[name](image, sign)
        done[row] = torch.from_numpy(np.array(image).reshape(pixels.shape)).permute(2, 0, 1)
        place.progress("defence", row + 1, len(images))
    return shown(images, {"policy": params.policy}, done)


DEFENCE = Defence("ats", AtsParams, _apply, is_per_image=True)
