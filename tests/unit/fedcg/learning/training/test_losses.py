"""Every loss against numbers worked out by hand; each test fails when a sign or a KL direction is reversed."""

import math
from collections.abc import Callable

import pytest
import torch

from fedcg.learning.training import losses
from tests.support.present import present

LN3 = math.log(3.0)
# p = (3/4, 1/4), q = (1/2, 1/2):
# KL(p || q) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.304099 - 0.173287 = 0.130812
# KL(q || p) = 1/2 ln(2/3) + 1/2 ln(2)   = -0.202733 + 0.346574 = 0.143841
SKEWED = torch.tensor([[LN3, 0.0]])  # softmax (3/4, 1/4)
EVEN = torch.tensor([[0.0, 0.0]])  # softmax (1/2, 1/2)
SKEWED_FROM_EVEN = 0.130812
EVEN_FROM_SKEWED = 0.143841


def test_the_cross_entropy_of_a_probability_of_three_quarters_is_its_negative_logarithm() -> None:
    assert losses.cross_entropy(SKEWED, torch.tensor([0])).item() == pytest.approx(math.log(4 / 3))
    assert losses.cross_entropy(SKEWED, torch.tensor([1])).item() == pytest.approx(math.log(4))


def test_the_feature_loss_is_a_mean_over_batch_and_elements_not_a_sum() -> None:
    # differences 1, 3, 0, 0: (1 + 9) / 4
    loss = losses.feature_mse(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
    assert loss.item() == pytest.approx(2.5)


def test_the_discriminator_is_rewarded_for_one_on_real_and_zero_on_generated_features() -> None:
    # D(real) = 3/4, D(generated) = 1/4: -ln(3/4) - ln(1 - 1/4) = 0.575364
    right = losses.discriminator_loss(torch.tensor([LN3]), torch.tensor([-LN3]))
    # the other way round: -ln(1/4) - ln(1/4) = 2.772589
    wrong = losses.discriminator_loss(torch.tensor([-LN3]), torch.tensor([LN3]))
    assert right.item() == pytest.approx(0.575364, abs=1e-6)
    assert wrong.item() == pytest.approx(2.772589, abs=1e-6)


def test_the_generator_loss_does_not_saturate_where_the_discriminator_is_sure() -> None:
    # D = 1/4: -ln(1/4) = 1.386294
    assert losses.generator_loss(torch.tensor([-LN3])).item() == pytest.approx(1.386294, abs=1e-6)
    sure = torch.tensor([-10.0], requires_grad=True)
    losses.generator_loss(sure).backward()
    assert present(sure.grad).item() == pytest.approx(-1.0, abs=1e-3)


def test_mode_seeking_is_the_noise_distance_over_the_feature_distance() -> None:
    # mean |difference| of features (1 + 3) / 2 = 2, of noise 4: 1 / (2 / 4 + 1e-5)
    loss = losses.mode_seeking(
        torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0]]), torch.tensor([[4.0]])
    )
    assert loss.item() == pytest.approx(1.99996, abs=1e-5)


def test_fedcg_divergence_is_from_the_teacher_to_the_student() -> None:
    assert losses.kl_teacher_student(SKEWED, EVEN).item() == pytest.approx(SKEWED_FROM_EVEN, abs=1e-6)
    assert losses.kl_teacher_student(EVEN, SKEWED).item() == pytest.approx(EVEN_FROM_SKEWED, abs=1e-6)


PRINTED, CODE = losses.Divergence(), losses.Divergence("teacher_student", 10.0)


def test_fedmd_cg_divergence_is_from_the_student_to_the_teacher() -> None:
    assert PRINTED.mean(SKEWED, EVEN).item() == pytest.approx(SKEWED_FROM_EVEN, abs=1e-6)
    assert PRINTED.mean(EVEN, SKEWED).item() == pytest.approx(EVEN_FROM_SKEWED, abs=1e-6)


def test_the_authors_divergence_is_from_the_teacher_to_the_student_at_a_temperature() -> None:
    # ten times the logits at temperature 10
    assert CODE.mean(EVEN, 10 * SKEWED).item() == pytest.approx(SKEWED_FROM_EVEN, abs=1e-6)
    assert CODE.mean(10 * SKEWED, EVEN).item() == pytest.approx(EVEN_FROM_SKEWED, abs=1e-6)


def test_a_divergence_is_a_mean_over_rows() -> None:
    both = losses.kl_teacher_student(torch.cat([SKEWED, EVEN]), torch.cat([EVEN, EVEN]))
    assert both.item() == pytest.approx(SKEWED_FROM_EVEN / 2, abs=1e-6)


@pytest.mark.parametrize("divergence", [PRINTED, CODE])
def test_the_slope_of_the_divergence_from_a_mean_teacher_is_that_of_the_weighted_sum_of_divergences(
    divergence: losses.Divergence,
) -> None:
    # Two teachers, with a quarter and three quarters of a label.
    student = torch.tensor([[1.0, -2.0]], requires_grad=True)
    logs = [divergence.log_softmax(logits) for logits in (SKEWED, EVEN)]
    whole = 0.25 * divergence.rows(student, logs[0]) + 0.75 * divergence.rows(student, logs[1])
    mean = 0.25 * divergence.summand(logs[0]) + 0.75 * divergence.summand(logs[1])
    slopes = [torch.autograd.grad(loss.sum(), student)[0] for loss in (divergence.rows_of_mean(student, mean), whole)]
    assert slopes[0].abs().max().item() > 1e-3
    assert torch.allclose(slopes[0], slopes[1], atol=1e-6)


@pytest.mark.parametrize("divergence", [PRINTED, CODE])
def test_a_row_whose_label_nobody_has_is_finite(divergence: losses.Divergence) -> None:
    student = torch.tensor([[5.0, -5.0]], requires_grad=True)
    loss = divergence.rows_of_mean(student, torch.zeros(1, 2))
    loss.sum().backward()
    assert bool(loss.isfinite().all() and present(student.grad).isfinite().all())


FEATURES = torch.tensor([[0.0, 0.0], [3.0, 4.0]])  # 5 apart
NOISE = torch.tensor([[0.0], [0.1]])  # 0.1 apart
ONE_CLASS = torch.tensor([1, 1])
TWO_CLASSES = torch.tensor([0, 1])
NO_SCALE = torch.ones(3)


@pytest.mark.parametrize(
    ("diversity", "of_one_class", "of_two_classes"),
    [
        # Label-agnostic. B = 2: mean over the four pairs of (0, -0.5, -0.5, 0) = -0.25; exp(-0.25)
        (losses.diversity_0, 0.778801, 0.778801),
        # The one-hot label beside the noise: distance of [z; y] = sqrt(0.01 + 2) = 1.417745; exp(-5 * 1.417745 / 2) = 0.028887
        (losses.diversity_1, 0.778801, 0.028887),
        # One-hot vectors of two classes are 2 apart in the 1-norm, and weigh e^2: exp(-0.5 * e^2 / 2) = 0.157668
        (losses.diversity_2, 0.778801, 0.157668),
        # The authors': features 25 / 2 apart, noise 0.01, both orders of the pair of four: exp(-2 * 12.5 * 0.01 / 4); two classes
        # weigh e^(2/3)
        (losses.diversity_mean_squared, math.exp(-0.0625), math.exp(-0.0625 * math.exp(2 / 3))),
    ],
)
def test_each_published_diversity_has_its_value_for_pairs_of_one_and_of_two_classes(
    diversity: Callable[..., torch.Tensor], of_one_class: float, of_two_classes: float
) -> None:
    for labels, expected in ((ONE_CLASS, of_one_class), (TWO_CLASSES, of_two_classes)):
        assert diversity(FEATURES, NOISE, labels, NO_SCALE).item() == pytest.approx(expected, abs=1e-6)


def test_the_normalised_diversity_counts_pairs_of_one_class_in_units_of_their_real_distance() -> None:
    noise = torch.tensor([[0.0, 0.0], [2.0, 0.0]])  # 2 / sqrt(2 * 2) = 1 unit apart
    scale = torch.tensor([1.0, 10.0, 2.5])
    # features 5 apart = half a unit of class 1: exp(-0.5 * 1)
    assert losses.diversity_normalised(FEATURES, noise, ONE_CLASS, scale).item() == pytest.approx(math.exp(-0.5))
    # two units of class 2, of which one counts: exp(-1)
    assert losses.diversity_normalised(FEATURES, noise, ONE_CLASS + 1, scale).item() == pytest.approx(math.exp(-1.0))
    assert losses.diversity_normalised(FEATURES, noise, TWO_CLASSES, scale).item() == 0.0


def test_the_published_diversity_underflows_at_real_sizes_where_the_normalised_one_has_a_slope() -> None:
    stream = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 128, generator=stream)
    labels = torch.zeros(16, dtype=torch.int64)
    spread = torch.rand(16, 400, generator=stream)
    gradients = {}
    for name, term in (("published", losses.diversity_2), ("normalised", losses.diversity_normalised)):
        features = spread.clone().requires_grad_()
        term(features, noise, torch.arange(16) % 2, torch.full((2,), 20.0)).backward()
        gradients[name] = present(features.grad).abs().max().item()
    assert losses.diversity_2(spread, noise, torch.arange(16) % 2, torch.ones(2)).item() == 0.0
    assert gradients["published"] == 0.0
    assert gradients["normalised"] > 0.0
    assert losses.diversity_normalised(spread, noise, labels, torch.full((1,), 20.0)).item() > 0.1


def test_the_authors_diversity_has_a_slope_at_real_sizes_and_where_two_rows_are_equal() -> None:
    stream = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 128, generator=stream)
    features = torch.rand(16, 400, generator=stream)
    features[3] = features[7]
    features.requires_grad_()
    losses.diversity_mean_squared(features, noise, torch.arange(16) % 2, torch.ones(2)).backward()
    assert features.grad is not None
    assert bool(features.grad.isfinite().all())
    assert features.grad.abs().max().item() > 0.0
