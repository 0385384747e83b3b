"""The searches find what they look for, however small the loss is, and their terms are those of the papers."""

import pytest
import torch

from audit.attacks.gradient_inversion import pixel_rank
from audit.evidence.networks import whole_model
from audit.techniques.gradients import (
    BatchGradient,
    Search,
    Start,
    batch_gradient,
    channel_statistics,
    cosine_distance,
    gradient_distance,
    search,
    total_variation,
)
from fedcg.wire.parts import Part
from tests.support.audit.cases import simulated_case

FORM, LABELS = (1, 4, 4), torch.tensor([0])


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("signed_adam", [False, True])
@pytest.mark.parametrize("prior", [0.0, 1e-6])
def test_a_search_reaches_the_minimum_of_a_loss_of_1e_minus_9(prior: float, signed_adam: bool) -> None:
    wanted = torch.rand(1, *FORM, generator=stream())
    how = Search(200, Start.GREY, prior, signed_adam=signed_adam)
    found = search(lambda pixels, _: 1e-9 * (pixels - wanted).square().sum(), LABELS, FORM, 2, how, stream())
    assert (found.pixels - wanted).abs().max() < 0.02
    assert found.diverged == 0


def test_searched_labels_reach_the_right_class() -> None:
    asked: list[torch.Tensor] = []

    def wants_class_one(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        asked.append(labels.detach())
        if labels.dim() == 1:
            return pixels.square().sum() + 1
        return pixels.square().sum() + (1 - labels[0, 1])

    search(wants_class_one, LABELS, FORM, 3, Search(100, Start.NOISE, soft_labels=True), stream())
    assert asked[-1][0, 1] > 0.99


def test_the_best_restart_is_the_one_of_the_smallest_loss_and_lost_ones_are_counted() -> None:
    lost = torch.randn(1, *FORM, generator=stream())

    def only_the_second_is_finite(pixels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        is_first = (pixels.detach() - lost).abs().max() < 0.1
        return pixels.square().sum() * (float("nan") if is_first else 1.0)

    found = search(only_the_second_is_finite, LABELS, FORM, 2, Search(20, Start.NOISE, restarts=2), stream())
    assert found.diverged == 0.5
    assert found.loss < 1e-3


def test_total_variation_by_hand() -> None:
    # Across: |1-0| and |0-1|, mean 1; down: |0-0|... of [[0, 1], [1, 0]]: |1-0|, |0-1|, mean 1.
    assert float(total_variation(torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]]))) == pytest.approx(2.0)
    assert float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))) == pytest.approx(1.0)


def test_channel_statistics_by_hand() -> None:
    # Channel 0 holds 0, 2: mean 1, deviation 1; channel 1 holds 3, 3: mean 3, deviation 0.
    found = channel_statistics(torch.tensor([[[0.0, 2.0], [3.0, 3.0]]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 3.0], [1.0, 0.0]]), atol=2e-4, rtol=0)


def test_distances_are_zero_at_the_truth_and_cosine_ignores_length() -> None:
    case = simulated_case(method="fedavg")
    model, train, parts = case.model(), case.truth.train, (Part.EXTRACTOR, Part.CLASSIFIER)
    assert model is not None
    pixels, other = train.images[:1] / 255.0, train.images[1:2] / 255.0
    seen = batch_gradient(case.view.spec, model, pixels, train.labels[:1], parts)
    longer = BatchGradient(parts, tuple(3 * one for one in seen.values), 1)
    whole = whole_model(case.view.spec, model[Part.EXTRACTOR], model[Part.CLASSIFIER])
    assert float(gradient_distance(whole, seen)(pixels, train.labels[:1]).detach()) < 1e-9
    assert float(gradient_distance(whole, seen)(other, train.labels[:1]).detach()) > 1e-3
    # |g - 3g|^2 / |3g|^2 = 4/9
    assert float(gradient_distance(whole, longer)(pixels, train.labels[:1]).detach()) == pytest.approx(4 / 9, rel=1e-3)
    assert float(cosine_distance(whole, longer)(pixels, train.labels[:1]).detach()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("numbers", [10, 200], ids=["fewer numbers than pixels", "more"])
def test_the_rank_of_a_linear_observation_is_its_matrix_rank(numbers: int) -> None:
    matrix = torch.randn(numbers, 3, generator=stream()) @ torch.randn(3, 16, generator=stream())
    assert pixel_rank(lambda pixels: (matrix @ pixels.flatten(),), torch.rand(1, *FORM), stream()) == 3


def test_an_observation_that_does_not_depend_on_some_pixels_cannot_determine_them() -> None:
    pixels = torch.rand(1, *FORM, generator=stream())
    assert pixel_rank(lambda image: (image[..., :2, :].square(),), pixels, stream()) == 8
