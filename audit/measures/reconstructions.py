"""Reconstructed images beside the right ones, and beside what somebody would guess who has seen no update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from audit.evidence.case import Knowledge, View
from audit.measures.figures import Figure
from audit.measures.images import psnr, ssim, unit_pixels
from audit.measures.statistics import Values, bootstrap
from fedcg.learning.image_set import ImageSet

Measure = Callable[[torch.Tensor, torch.Tensor], Values]
NEAREST = "the nearest auxiliary image of its class"
"""Not a guess: only somebody who has the right image can choose it. What an image that looks a little alike scores."""
MEASURES: Mapping[str, tuple[Measure, str]] = {"psnr": (psnr, "dB"), "ssim": (ssim, "")}


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
        measure, _ = MEASURES[name]
        found = {floor: measure(guess, truth) for floor, (guess, truth) in self.floors.items() if floor != NEAREST}
        best = max(found, key=lambda floor: float(found[floor].mean()))
        return best, found[best]

    def figure(
        self, name: str, setting: str, knowledge: tuple[Knowledge, ...], ceiling: float | None, seed: int
    ) -> Figure:
        """PSNR or SSIM with its gain over the best floor, paired image by image."""
        measure, unit = MEASURES[name]
        values, (floor_is, floor) = measure(self.guesses, self.truth), self.best_floor(name)
        return Figure(
            name,
            f"Reconstruction, {name.upper()}",
            setting,
            knowledge,
            bootstrap(values, seed),
            float(floor.mean()),
            floor_is,
            bootstrap(values - floor, seed),
            len(values),
            ceiling,
            unit,
        )


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
