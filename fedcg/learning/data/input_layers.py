"""Layers without weights in front of a network: one-hot encoding of categories, and log-mel spectrograms of sound.

Their constants follow from their arguments. They are in no stored state, never leave the device, and are part of
exported models.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

_FLOOR = 1e-8
"""Added to the power of a band, where a full-scale sine has about 0.25. float32 rounding stays far below it."""


class OneHot(nn.Module):
    """[B, columns] to [B, width]: numbers unchanged; a category as 1 at its value, all 0 without a value.

    Args:
        columns: name to the values of a category, or to None for a number.
    """

    source: torch.Tensor
    code: torch.Tensor

    def __init__(self, columns: Mapping[str, Sequence[str] | None]) -> None:
        super().__init__()
        self.columns = dict(columns)
        made = [
            (place, -2.0 if values is None else float(code))  # -2 matches no code
            for place, values in enumerate(columns.values())
            for code in range(1 if values is None else len(values))
        ]
        self.width = len(made)
        self.register_buffer("source", torch.tensor([place for place, _ in made]), persistent=False)
        self.register_buffer("code", torch.tensor([code for _, code in made]), persistent=False)

    def extra_repr(self) -> str:
        """The encoded columns and values, which identify the layer."""
        return str(self.columns)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The encoded rows for the network."""
        spread = rows.index_select(1, self.source)
        return torch.where(self.code >= 0, (spread == self.code).to(spread.dtype), spread)


class LogMel(nn.Module):
    """[B, C, samples] to [B, C, bands, frames]: log power of each band, from frames under a Hann window with sum 1, without padding.

    The bands are triangles of height 1 with corners at equal steps of the mel scale, 2595 log10(1 + f / 700), from 0 to half the rate.

    Args:
        rate: samples per second.
        bands: number of mel bands.
        n_fft: samples per frame.
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
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # the 10 bits of TF32 would mask quiet sound
            waves = F.conv1d(signals.flatten(0, 1)[:, None], self.kernel, stride=self.hop)
        real, imaginary = waves.chunk(2, dim=1)
        power = torch.matmul(self.weights, real * real + imaginary * imaginary)
        spectrograms: torch.Tensor = torch.log(power + _FLOOR).unflatten(0, (-1, signals.shape[1]))
        return spectrograms
