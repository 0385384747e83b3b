"""Intervals and ROC figures, by hand."""

import numpy as np
import pytest
import torch

from audit.attacks.membership import auc, auc_interval, roc, true_positive_rate
from audit.measures import bootstrap, png, proportion, psnr, ssim, unit_pixels


def test_a_share_of_none_has_the_exact_upper_bound() -> None:
    # Clopper-Pearson with 0 of n: upper = 1 - (0.05 / 2)^(1 / n) = 1 - 0.025^0.1 for n = 10.
    found = proportion(0, 10)
    assert found.value == 0
    assert found.low == 0
    assert found.high == pytest.approx(1 - 0.025**0.1)


def test_a_bootstrap_covers_the_mean_and_a_single_value_is_its_own_interval() -> None:
    values = np.arange(100, dtype=np.float64)
    found = bootstrap(values, 0)
    assert found.value == 49.5
    # Standard error of the mean: 28.87 / 10 = 2.89; 1.96 of them on either side.
    assert found.low == pytest.approx(49.5 - 5.66, abs=0.6)
    assert found.high == pytest.approx(49.5 + 5.66, abs=0.6)
    alone = bootstrap(np.array([3.0]), 0)
    assert (alone.value, alone.low, alone.high) == (3.0, 3.0, 3.0)


def test_auc_counts_pairs() -> None:
    # Pairs (member, other): (3, 2) right, (3, 4) wrong, (1, 2) wrong, (1, 4) wrong: 1 of 4.
    assert auc(np.array([3.0, 1.0]), np.array([2.0, 4.0])) == 0.25
    assert auc(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0.5
    found = auc_interval(np.arange(50.0) + 25, np.arange(50.0), 0)
    assert found.low < found.value < found.high


def test_the_rate_at_few_false_positives_stays_under_them() -> None:
    others = np.arange(100, dtype=np.float64)
    members = np.array([99.5, 98.5, 98.0, 1.0])
    # 1 % of 100 others: one may pass, so the threshold is 98 and lies below 99.5 and 98.5 alone.
    assert true_positive_rate(members, others, 0.01).value == 0.5
    points = roc(members, others)
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)


def test_psnr_and_ssim_of_images() -> None:
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.5
    # A difference of 0.1 everywhere: MSE 0.01, so 10 log10(1 / 0.01) = 20 dB.
    assert psnr(image + 0.1, image) == pytest.approx([20.0, 20.0], abs=1e-4)
    assert ssim(image, image) == pytest.approx([1.0, 1.0])
    assert (ssim(image.flip(0), image) < 0.5).all()
    assert unit_pixels(torch.tensor([255], dtype=torch.uint8)).item() == 1.0
    assert png(image[0]).startswith("iVBOR")
    assert png(image[0, :1]).startswith("iVBOR")
