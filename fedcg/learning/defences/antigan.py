"""Anti-GAN (Luo and Zhang, 2025): real training images mixed with generated ones whose visual details are obfuscated. Torch-free.

A conditional GAN learns the device's own images in the space of a fixed first convolution C (eq. 3), while a second
loss pulls the pixel variance of every window of a generated image to v_e (eq. 2). Each real image is then mixed once
with a generated image of its class (algorithm 1). It defends against attackers who learn a class's distribution from
shared weights. There is no formal guarantee.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcg.learning.defences.defence import Defence, DefencePlace, Defended
from fedcg.learning.defences.params import AntiGanParams, Size
from fedcg.learning.errors import DefenceError

if TYPE_CHECKING:
    from fedcg.learning.image_set import ImageSet


def _check(params: AntiGanParams, place: DefencePlace, size: Size) -> None:
    _, height, width = size
    if params.window > min(height, width):
        raise DefenceError(
            f"antigan: window = {params.window} is larger than the images of {height}x{width} pixels: lower `window`"
        )


def _apply(images: ImageSet, params: AntiGanParams, place: DefencePlace) -> Defended:
    from fedcg.learning.defences.gan_mixing import mixed_images  # imports torch, not needed to read a configuration

    channels, height, width = images.images.shape[1:]
    _check(params, place, (channels, height, width))
    return mixed_images(images, params, place)


DEFENCE = Defence("antigan", AntiGanParams, _apply, is_per_image=False, check=_check)
