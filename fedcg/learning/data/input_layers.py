"""Layers in front of a network, without weights: categories of a table as ones and zeros, sound as log-mel spectrograms.

What they compute with is part of no stored state: it follows from how they were made, leaves no device, and is inside exported models.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

_FLOOR = 1e-8
"""Added to the power of a band, in which a full-scale sine has about 0.25: rounding in float32 stays far below it."""


class OneHot(nn.Module):
    """[B, columns] to [B, width]: numbers as they are; of a category 1 at its value, all 0 where it has none.

    Args:
        columns: by name the values of a category, or None for numbers.
    """

    source: torch.Tensor
    code: torch.Tensor

    def __init__(self, columns: Mapping[str, Sequence[str] | None]) -> None:
        super().__init__()
        self.columns = dict(columns)
        made = [
            (place, -2.0 if values is None else float(code))  # -2: no code
            for place, values in enumerate(columns.values())
            for code in range(1 if values is None else len(values))
        ]
        self.width = len(made)
        self.register_buffer("source", torch.tensor([place for place, _ in made]), persistent=False)
        self.register_buffer("code", torch.tensor([code for _, code in made]), persistent=False)

    def extra_repr(self) -> str:
        """What it makes ones and zeros of, by which two are told apart."""
        return str(self.columns)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the network gets them."""
        spread = rows.index_select(1, self.source)
        return torch.where(self.code >= 0, (spread == self.code).to(spread.dtype), spread)


class LogMel(nn.Module):
    """[B, C, samples] to [B, C, bands, frames]: the logarithm of each band's power, of frames under a Hann window whose sum is 1, without padding.

    The bands are triangles of height 1 with corners at equal steps of the mel scale, 2595 log10(1 + f / 700), from 0 to half the rate.

    Args:
        rate: samples in a second.
        bands: number of mel bands.
        n_fft: samples of a frame.
        hop: samples between the starts of two frames.
    """

    kernel: torch.Tensor
    weights: torch.Tensor

    def __init__(self, rate: int, bands: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.hop = hop
        samples, bins = np.arange(n_fft), np.arange(n_fft // 2 + 1)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * samples / n_fft)
        angles = 2 * np.pi * (np.outer(bins, samples) % n_fft) / n_fft
        waves = np.concatenate([np.cos(angles), -np.sin(angles)]) * (window / window.sum())
        corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), bands + 2) / 2595) - 1)
        low, centre, high = (corners[place : place + bands, None] for place in range(3))
        hertz = bins * (rate / n_fft)
        triangles = np.clip(np.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre)), 0, None)
        self.register_buffer("kernel", torch.from_numpy(waves[:, None].astype(np.float32)), persistent=False)
        self.register_buffer("weights", torch.from_numpy(triangles.astype(np.float32)), persistent=False)

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        """Spectrograms of windows."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # its 10 bits would cover what is quiet
            waves = F.conv1d(signals.flatten(0, 1)[:, None], self.kernel, stride=self.hop)
        real, imaginary = waves.chunk(2, dim=1)
        power = torch.matmul(self.weights, real * real + imaginary * imaginary)
        spectrograms: torch.Tensor = torch.log(power + _FLOOR).unflatten(0, (-1, signals.shape[1]))
        return spectrograms
