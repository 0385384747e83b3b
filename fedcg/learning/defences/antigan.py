"""Anti-GAN (Luo and Zhang, 2025): real training images mixed with generated ones whose visual details are obfuscated. Torch-free.

A conditional GAN learns the device's own images in the space of a fixed first convolution C (eq. 3), while a second loss pulls
the pixel variance of every window of a generated image to v_e (eq. 2). Each real image is then mixed once with a generated image
of its class (algorithm 1). Against attackers who learn a class's distribution from shared weights; there is no proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedcg.learning.defences.defence import Defence, DefenceParams, DefencePlace, Defended, Size
from fedcg.learning.errors import DefenceError

if TYPE_CHECKING:
    from fedcg.learning.image_set import ImageSet

_Steps = Annotated[int, Field(ge=0, le=1_000_000)]


class AntiGanParams(DefenceParams):
    """Parameters; defaults are the paper's where it states them, and steps and width those of a box without a GPU.

    Attributes:
        v_e: variance that every window of a generated image is pulled to, pixels in [-1, 1] (at most 1.0).
        mu: share of the real image in the mixed one (μ).
        obfuscation_weight: λ of eq. 4.
        window: side of a window, pixels.
        gan_steps: steps of the first training, without obfuscation.
        obfuscation_steps: steps of the second training, with eq. 4.
        batch_size: images of a step.
        lr: learning rate of Adam; the paper's 1e-4 is for longer training.
        width: maps of the generator before its last layer; 64 in the paper, four times the work.
        noise_dim: numbers in z.
        features: C; `auto` is the pretrained convolution where its weights are at hand, else the Gabor bank.
        checkpoint_every: steps after which training is made durable.
    """

    v_e: Annotated[float, Field(ge=0, le=1)] = 0.5
    mu: Annotated[float, Field(ge=0, le=1)] = 0.5
    obfuscation_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 250.0
    window: Annotated[int, Field(ge=2, le=1024)] = 4
    gan_steps: _Steps = 600
    obfuscation_steps: _Steps = 200
    batch_size: Annotated[int, Field(ge=2, le=4096)] = 50
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    width: Annotated[int, Field(ge=1, le=256)] = 32
    noise_dim: Annotated[int, Field(ge=1, le=1024)] = 100
    features: Literal["auto", "efficientnet_lite0", "gabor"] = "auto"
    checkpoint_every: Annotated[int, Field(ge=1)] = 100

    @property
    def steps(self) -> int:
        """Of both trainings."""
        return self.gan_steps + self.obfuscation_steps


def _check(params: AntiGanParams, place: DefencePlace, size: Size) -> None:
    _, height, width = size
    if params.window > min(height, width):
        raise DefenceError(
            f"antigan: window = {params.window} is larger than the images of {height}x{width} pixels: lower `window`"
        )


def _apply(images: ImageSet, params: AntiGanParams, place: DefencePlace) -> Defended:
    from fedcg.learning.defences.gan_mixing import mixed_images  # torch comes with it: not for a configuration

    channels, height, width = images.images.shape[1:]
    _check(params, place, (channels, height, width))
    return mixed_images(images, params, place)


DEFENCE = Defence("antigan", AntiGanParams, _apply, is_per_image=False, check=_check)
