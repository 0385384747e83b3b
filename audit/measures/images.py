"""How alike images are (PSNR, SSIM), reconstructed ones beside what somebody would guess who has seen no update, and PNGs for a report.

Images are [N, C, H, W] float32 in [0, 1].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from audit.evidence import Knowledge, View
from audit.measures.figures import Figure, Measure, Values, best_of
from fedcg.learning.image_set import ImageSet

_SSIM_WINDOW = 7  # Anti-GAN §5.1 has windows of 8x8, all pixels weighted alike; the library's are odd
_SHOWN_SIDE = 64


def psnr(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """PSNR in dB of every image, [N] (FedCG §4.2); guesses are clamped to [0, 1]."""
    return np.array([peak_signal_noise_ratio(right, guess, data_range=1.0) for guess, right in _pairs(guesses, truth)])


def ssim(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """SSIM of every image, [N], uniform windows (Anti-GAN §5.1); guesses are clamped to [0, 1]."""
    found = [
        structural_similarity(right, guess, win_size=_SSIM_WINDOW, channel_axis=0, data_range=1.0)
        for guess, right in _pairs(guesses, truth)
    ]
    return np.array(found)


def _pairs(guesses: torch.Tensor, truth: torch.Tensor) -> Iterator[tuple[Values, Values]]:
    return zip(guesses.detach().clamp(0, 1).double().numpy(), truth.double().numpy(), strict=True)


def unit_pixels(images: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] uint8 -> float32 in [0, 1]."""
    return images.float() / 255.0


def png(image: torch.Tensor) -> str:
    """One image [C, H, W] in [0, 1] as a base64 PNG, enlarged without smoothing so that a person sees its pixels."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.ascontiguousarray(pixels.squeeze()))
    scale = max(1, _SHOWN_SIDE // max(picture.size))
    stream = io.BytesIO()
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(
        stream, "PNG", optimize=True
    )
    return base64.b64encode(stream.getvalue()).decode()


Likeness = Callable[[torch.Tensor, torch.Tensor], Values]
NEAREST = "the nearest auxiliary image of its class"
"""Not a guess: only somebody who has the right image can choose it. What an image that looks a little alike scores."""
MEASURES: Mapping[str, tuple[Likeness, Measure]] = {
    "psnr": (psnr, Measure("psnr", "Reconstruction, PSNR", "dB")),
    "ssim": (ssim, Measure("ssim", "Reconstruction, SSIM")),
}


@dataclass(frozen=True)
class Reconstructions:
    """Guesses and the images that they are compared with, in one order, both [N, C, H, W] in [0, 1].

    Attributes:
        floors: trivial guesses by name, each with the images that it is compared with.
    """

    guesses: torch.Tensor
    truth: torch.Tensor
    floors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def mean(self, name: str) -> float:
        """Mean PSNR or SSIM of the guesses."""
        return float(MEASURES[name][0](self.guesses, self.truth).mean())

    def best_floor(self, name: str) -> tuple[str, Values]:
        """The trivial guess of the highest mean, and its values, image by image; `NEAREST` is none."""
        likeness, _ = MEASURES[name]
        return best_of((floor, likeness(*pair)) for floor, pair in self.floors.items() if floor != NEAREST)

    def figure(self, name: str, setting: str, used: Collection[Knowledge], ceiling: float | None, seed: int) -> Figure:
        """PSNR or SSIM with its gain over the best floor, paired image by image."""
        likeness, measure = MEASURES[name]
        values = likeness(self.guesses, self.truth)
        return measure.paired(setting, used, values, [self.best_floor(name)], seed, ceiling=ceiling)


def trivial_guesses(view: View, truth: ImageSet, stream: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Guesses of one who has seen no update, [N, C, H, W] in [0, 1], and `NEAREST` beside them: the first three take no label.

    Args:
        view: for the form of images, and the auxiliary ones; without them there are the first two guesses alone.
        truth: the images that are guessed.
        stream: for the noise.
    """
    form = (view.spec.image.channels, view.spec.image.height, view.spec.image.width)
    yield "clamped noise", torch.randn((len(truth), *form), generator=stream).clamp(0, 1)
    yield "grey", torch.full((len(truth), *form), 0.5)
    if view.auxiliary is None:
        return
    pixels = unit_pixels(view.auxiliary.images)
    yield "the mean of the auxiliary images", pixels.mean(0).expand(len(truth), *form)
    means, nearest = [], []
    for image, label in zip(unit_pixels(truth.images), truth.labels, strict=True):
        same = pixels[view.auxiliary.labels == label] if (view.auxiliary.labels == label).any() else pixels
        means.append(same.mean(0))
        nearest.append(same[nearest_row(image, same)])
    yield "the mean auxiliary image of its class", torch.stack(means)
    yield NEAREST, torch.stack(nearest)


def nearest_row(image: torch.Tensor, others: torch.Tensor) -> int:
    """The row of [N, C, H, W] with the smallest squared distance to an image [C, H, W]."""
    return int((others - image).square().flatten(1).sum(1).argmin())
