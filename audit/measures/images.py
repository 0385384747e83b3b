"""How alike images are (PSNR, SSIM), and images as PNGs for a report. Images are [N, C, H, W] float32 in [0, 1]."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from audit.measures.statistics import Values

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
