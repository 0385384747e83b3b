"""Random changes to training images: what is drawn for each, from streams of their own, and done to raw pixels a block at a time.

Crops are drawn from the stream "crop" and mirrors from "flip", and only where the spec asks for them: neither shifts the other's
draws, nor those of anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec


@dataclass(frozen=True)
class Augmentation:
    """What happens to R images: a window of the padded image is cut out, then it is mirrored or not.

    Attributes:
        spec: whether to crop and to mirror.
        choices: [R, 3] int64, per image the window's top and left in 0..2 * `augment_crop`, and 1 to mirror it; 0 where the spec
            does not ask.
    """

    spec: FederationSpec
    choices: torch.Tensor

    def __getitem__(self, rows: slice) -> Augmentation:
        """That of some of the images."""
        return Augmentation(self.spec, self.choices[rows])

    @property
    def mirrored(self) -> torch.Tensor:
        """Which images are mirrored, [R] bool."""
        return self.choices[:, 2] > 0

    def apply(self, images: torch.Tensor) -> torch.Tensor:
        """Change images, before they are normalised; where a window reaches over an edge it is black (0).

        Args:
            images: [R, C, H, W] uint8, on any device.

        Returns:
            [R, C, H, W] uint8, on the same.
        """
        top, left, mirrored = self.choices.to(images.device).unbind(1)
        if self.spec.augment_crop:
            height, width = images.shape[2:]
            padded = F.pad(images, (self.spec.augment_crop,) * 4)
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [R, C, tops, lefts, H, W], a view
            images = windows[torch.arange(len(images), device=images.device), :, top, left]
        if self.spec.augment_flip:
            images = torch.where(mirrored.view(-1, 1, 1, 1) > 0, images.flip(-1), images)
        return images


class Augmenter:
    """Draws the augmentation of one block of images after the other."""

    def __init__(self, spec: FederationSpec, streams: Streams) -> None:
        self._spec = spec
        self._crop, self._flip = streams.generator("crop"), streams.generator("flip")

    def draw(self, rows: int) -> Augmentation:
        """That of the next `rows` images: every window is as likely as any other, and half of the images are mirrored."""
        choices = torch.zeros(rows, 3, dtype=torch.int64)
        if self._spec.augment_crop:
            choices[:, :2] = torch.randint(2 * self._spec.augment_crop + 1, (rows, 2), generator=self._crop)
        if self._spec.augment_flip:
            choices[:, 2] = torch.rand(rows, generator=self._flip) < 0.5
        return Augmentation(self._spec, choices)
