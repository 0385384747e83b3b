"""Anti-GAN's measure of how alike two labelled sets of images are (eq. 5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

WINDOW = 8  # Anti-GAN §5.1; all pixels of a window weighted alike
_C1, _C2 = 0.01**2, 0.03**2  # of Wang et al. (2004), for values in [0, 1]
_PAIRS = 2048


def pairwise_ssim(left: torch.Tensor, right: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """SSIM of every image with every other one; over all places of the window and all channels, with sample variances.

    Args:
        left: [N, C, H, W] float32 in [0, 1].
        right: [M, C, H, W], likewise.
        window: side, pixels.

    Returns:
        [N, M] float32.

    Raises:
        ValueError: the window is larger than the images.
    """
    if window > min(left.shape[2:]):
        raise ValueError(f"window: {window} is larger than images of {left.shape[2]}x{left.shape[3]}")
    sample = window**2 / (window**2 - 1)
    (mean_x, var_x), (mean_y, var_y) = (_moments(images, window, sample) for images in (left, right))
    rows = []
    step = max(1, _PAIRS // len(right))
    for at in range(0, len(left), step):
        x = left[at : at + step, None]
        products = F.avg_pool2d((x * right).flatten(0, 1), window, 1).unflatten(0, (len(x), len(right)))
        means = mean_x[at : at + step, None] * mean_y
        squares = mean_x[at : at + step, None].square() + mean_y.square()
        likeness = (2 * means + _C1) / (squares + _C1)
        texture = (2 * sample * (products - means) + _C2) / (var_x[at : at + step, None] + var_y + _C2)
        rows.append((likeness * texture).mean(dim=(2, 3, 4)))
    return torch.cat(rows)


def _moments(images: torch.Tensor, window: int, sample: float) -> tuple[torch.Tensor, torch.Tensor]:
    mean = F.avg_pool2d(images, window, 1)
    return mean, sample * (F.avg_pool2d(images.square(), window, 1) - mean.square())


def class_ssim(
    guesses: torch.Tensor,
    guess_labels: torch.Tensor,
    truth: torch.Tensor,
    truth_labels: torch.Tensor,
    window: int = WINDOW,
) -> float:
    """Anti-GAN eq. 5: each guess's mean SSIM with all true images of its class, averaged over the guesses.

    Args:
        guesses: [N, C, H, W] float32 in [0, 1], N > 0; mixed or reconstructed images.
        guess_labels: [N] int64.
        truth: [M, C, H, W], likewise: the real images.
        truth_labels: [M] int64.
        window: side, pixels.

    Raises:
        ValueError: no guesses, a class of theirs without a true image, or a window larger than the images.
    """
    if not len(guesses):
        raise ValueError("guesses: no image")
    total = 0.0
    for label in guess_labels.unique():
        real = truth[truth_labels == label]
        if not len(real):
            raise ValueError(f"truth: no image of class {int(label)}, which is among the guesses")
        total += float(pairwise_ssim(guesses[guess_labels == label], real, window).mean(dim=1).double().sum())
    return total / len(guesses)
