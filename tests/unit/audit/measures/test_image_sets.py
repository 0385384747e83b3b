"""Eq. 5 of Anti-GAN against scikit-image, image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity

from audit.measures.image_sets import class_ssim, pairwise_ssim


def draw(count: int, seed: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, channels, 12, 10, generator=torch.Generator().manual_seed(seed))


def test_pairwise_ssim_agrees_with_scikit_image() -> None:
    left, right = draw(3, 1), 0.5 * draw(4, 2) + 0.3
    expected = [
        [
            structural_similarity(y.numpy(), x.numpy(), win_size=7, channel_axis=0, data_range=1.0)
            for y in right.double()
        ]
        for x in left.double()
    ]
    assert pairwise_ssim(left, right, 7).numpy() == pytest.approx(np.array(expected), abs=2e-4)


def test_ssim_of_one_window_of_8_by_hand() -> None:
    x, y = (torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    covariance = np.cov(x.flatten(), y.flatten())  # sample covariances, n - 1
    means, c1, c2 = (float(x.mean()), float(y.mean())), 1e-4, 9e-4
    likeness = (2 * means[0] * means[1] + c1) / (means[0] ** 2 + means[1] ** 2 + c1)
    texture = (2 * covariance[0, 1] + c2) / (covariance[0, 0] + covariance[1, 1] + c2)
    assert float(pairwise_ssim(x.float(), y.float())) == pytest.approx(likeness * texture, abs=1e-5)


def test_eq_5_compares_within_classes_and_weighs_every_guess_alike() -> None:
    guesses, truth = draw(4, 3), draw(5, 4)
    guess_labels, truth_labels = torch.tensor([0, 1, 1, 1]), torch.tensor([1, 0, 0, 1, 1])
    per_guess = [
        float(pairwise_ssim(guesses[[row]], truth[truth_labels == label]).mean())
        for row, label in enumerate(guess_labels)
    ]
    found = class_ssim(guesses, guess_labels, truth, truth_labels)
    assert found == pytest.approx(sum(per_guess) / 4, abs=1e-6)
    alone = torch.arange(5)
    assert class_ssim(truth, alone, truth, alone) == pytest.approx(1.0, abs=1e-5)


def test_what_can_not_be_compared_is_named() -> None:
    images, labels = draw(2, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="truth: no image of class 1"):
        class_ssim(images, labels, images[:1], labels[:1])
    with pytest.raises(ValueError, match="guesses: no image"):
        class_ssim(images[:0], labels[:0], images, labels)
    with pytest.raises(ValueError, match="window: 11 is larger than images of 12x10"):
        pairwise_ssim(images, images, 11)
