"""What follows from gradients without a search, what searches find, and gradient inversion as an attack with its controls."""

from dataclasses import replace

import pytest
import torch

from audit.attacks import gradient_inversion
from audit.attacks.attack import Effort
from audit.evidence.case import Extractor, Knowledge
from audit.evidence.networks import whole_model
from audit.measures import Reconstructions, trivial_images, unit_pixels
from audit.techniques import gradients
from audit.techniques.image_decoder import PrincipalComponents
from fedcg.learning.image_set import ImageSet
from fedcg.wire.parts import Part
from tests.support.audit import carried_out, outcome_of, simulated_case
from tests.support.present import present


def in_the_blink_of_an_eye(monkeypatch: pytest.MonkeyPatch, pixels: float) -> None:
    """Every search ends at once with one constant image."""

    def constant(
        objective: gradients.Objective, labels: torch.Tensor, form: tuple[int, int, int], *_: object
    ) -> gradients.Found:
        found = torch.full((len(labels), *form), pixels)
        assert objective(found, labels).isfinite()
        return gradients.Found(found, 0.0, 0.0)

    monkeypatch.setattr(gradient_inversion, "search", constant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "least", "controls"), [("fedcg", 2.5, 1), ("fedavg", 12.0, 2), ("fedsplit", 1.5, 1)]
)
def test_single_gradients_show_images_far_above_the_mean_of_the_class(method: str, least: float, controls: int) -> None:
    outcome = outcome_of("inversion", method=method)
    psnr = [figure for figure in outcome.figures if figure.name == "psnr"]
    best = max((figure for figure in psnr if figure.is_possible), key=lambda figure: figure.gain.value)
    assert best.floor_is == "the mean auxiliary image of its class"
    assert best.gain.value > least  # from grey: -5 to -6 dB
    assert present(best.p) < 0.001
    assert max(figure.value.value for figure in psnr) - best.floor > 12
    assert [control.passed for control in outcome.controls] == [True] * controls
    assert {figure.name for figure in outcome.figures} == {"psnr", "ssim"}
    for figure in outcome.figures:
        assert figure.gain.low <= figure.gain.value <= figure.gain.high
        assert figure.value.value - figure.floor == pytest.approx(figure.gain.value, abs=1e-6)
    assert outcome.pictures


def test_the_controls_fail_when_the_search_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = carried_out("inversion", simulated_case(method="fedsplit"))
    assert [control.passed for control in outcome.controls] == [False]
    assert all(figure.gain.value <= 0 for figure in outcome.figures if figure.name == "psnr")


def test_if_whole_models_are_sent_the_ceiling_is_the_best_setting_with_a_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = carried_out("inversion", simulated_case(method="fedavg"))
    for name in ("psnr", "ssim"):
        figures = [figure for figure in outcome.figures if figure.name == name]
        best = max(figure.value.value for figure in figures if "with prior" in figure.setting)
        assert [figure.ceiling for figure in figures] == [best] * len(figures)


@pytest.mark.parametrize("effort", list(Effort))
@pytest.mark.parametrize("method", ["fedcg", "fedavg", "fedsplit"])
def test_settings_have_words_of_their_own_and_name_the_knowledge_that_they_take(method: str, effort: Effort) -> None:
    view = simulated_case(method=method).view
    settings = gradient_inversion.settings_of(view, effort)
    assert len({one.words for one in settings}) == len(settings)
    for setting in settings:
        assert (Knowledge.PRIVATE in setting.knowledge) == ("extractor true" in setting.words)
        assert (Knowledge.AUXILIARY in setting.knowledge) == (
            "surrogate" in setting.words or "auxiliary" in setting.words
        )
    assert not any(
        "surrogate" in one.words or "auxiliary" in one.words
        for one in gradient_inversion.settings_of(replace(view, auxiliary=None), effort)
    )


def test_the_rounds_weight_difference_is_the_gradient_that_moved_it() -> None:
    view = simulated_case(method="fedsplit").view
    seen = gradient_inversion.round_difference(view, (Part.CLASSIFIER,))
    moved = view.before.parts[Part.CLASSIFIER]["5.bias"] - view.update[Part.CLASSIFIER]["5.bias"]
    torch.testing.assert_close(seen.values[-1], moved)


def test_only_guesses_of_the_right_images_gain_over_the_floor() -> None:
    case = simulated_case(method="fedsplit")
    images = case.truth.train.rows(range(16))
    pixels, stream = unit_pixels(images.images), torch.Generator().manual_seed(1)
    floors = {name: (guess, pixels) for name, guess in trivial_images(case.view, images, stream)}
    mean, _ = floors["the mean auxiliary image of its class"]
    tried = mean, (pixels + 0.01).clamp(0, 1), pixels.roll(1, 0)  # the last: images of another observation
    floor, right, other = (Reconstructions(one, pixels, floors).figure("psnr", "", (), None, 1) for one in tried)
    assert (floor.gain.value, floor.gain.high, floor.p) == (0, 0, 1)
    assert right.gain.low > 3
    assert right.p == right.least_p == 2**-16
    assert other.gain.value < 0
    assert present(other.p) >= 0.5


def test_principal_components_give_the_mean_image_of_a_class_and_unit_coefficients() -> None:
    known = present(simulated_case(method="fedsplit").view.auxiliary)
    pixels = unit_pixels(known.images)
    space = PrincipalComponents(known, 256, stream())
    mean = pixels[known.labels == 3].mean(0)
    torch.testing.assert_close(space.pixels(space.class_means(torch.tensor([3])))[0], mean, atol=1e-3, rtol=0)
    sizes = space.components.square().sum(1)  # variances
    found = (pixels.flatten(1) - space.mean) @ space.components[-32:].T / sizes[-32:]
    torch.testing.assert_close(found.square().mean(0), torch.ones(32), atol=1e-2, rtol=0)
    assert sizes.min() > 1e-8 * sizes.max()


def test_a_surrogate_fits_the_features_that_the_attacker_knows() -> None:
    case = simulated_case(method="fedsplit")
    true, train = present(case.model()), case.truth.train
    model = whole_model(case.view.spec, true)
    pixels = unit_pixels(train.images)
    features = model.features(pixels).detach()
    similar = []
    for known in (None, ImageSet(features, train.labels, train.classes)):
        found = gradients.attacker_model(case.view, Extractor.SURROGATE, case.streams, 5, known).features(pixels)
        similar.append(torch.nn.functional.cosine_similarity(found.flatten(1), features.flatten(1)).mean())
    assert similar[1] > similar[0] + 0.05


def test_a_batch_is_put_into_the_order_that_fits_best() -> None:
    truth = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gradient_inversion.in_best_order(truth[[2, 0, 3, 1]], truth), truth)


def of_bias(values: list[float], rows: int) -> gradients.BatchGradient:
    return gradients.BatchGradient((Part.CLASSIFIER,), (torch.tensor(values),), rows)


def test_the_label_of_one_image_is_the_negative_number_of_the_bias_gradient() -> None:
    # softmax (0.2, 0.3, 0.5) - onehot of class 1
    assert gradients.revealed_labels(of_bias([0.2, -0.7, 0.5], 1)).tolist() == [1]


def test_the_labels_of_a_batch_are_taken_off_one_by_one() -> None:
    # Mean softmax 1/3 each; labels 0, 0, 2, 2 of 4: 1/3 - 1/2, 1/3 - 0, 1/3 - 1/2.
    assert sorted(gradients.revealed_labels(of_bias([-1 / 6, 1 / 3, -1 / 6], 4)).tolist()) == [0, 0, 2, 2]


def test_the_classifiers_gradient_of_one_image_holds_its_features_exactly() -> None:
    case = simulated_case(method="fedsplit")
    true, train = present(case.model()), case.truth.train
    pixels = unit_pixels(train.images[:1])
    seen = gradients.batch_gradient(case.view.spec, true, pixels, train.labels[:1], (Part.CLASSIFIER,))
    given = gradients.attacker_model(case.view.with_private(case.truth.before or {}), Extractor.TRUE, case.streams, 1)
    wrong = gradients.attacker_model(case.view, Extractor.RANDOM, case.streams, 1)
    features = gradients.linear_inputs(given, pixels)[0]
    assert gradients.revealed_labels(seen).tolist() == train.labels[:1].tolist()
    # The attacker's own model only says where in the gradient the layer is.
    torch.testing.assert_close(gradients.revealed_features(wrong, seen), features, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(gradients.linear_inputs(wrong, pixels)[0], features, rtol=1e-2, atol=1e-2)


def test_standardised_maps_forget_level_and_spread_of_each_map() -> None:
    spec = simulated_case(method="fedsplit").view.spec
    features = torch.rand(2, 400)
    levels, spreads = torch.rand(16, 1), 1 + torch.rand(16, 1)
    moved = (features.view(2, 16, 25) * spreads + levels).flatten(1)
    torch.testing.assert_close(
        gradients.standardised(moved, spec), gradients.standardised(features, spec), rtol=1e-3, atol=1e-3
    )
    assert gradients.standardised(features, spec).view(2, 16, 25).mean(2).abs().max() < 1e-5


FORM, LABELS = (1, 4, 4), torch.tensor([0])


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("signed_adam", [False, True])
@pytest.mark.parametrize("prior", [0.0, 1e-6])
def test_a_search_reaches_the_minimum_of_a_loss_of_1e_minus_9(prior: float, signed_adam: bool) -> None:
    wanted = torch.rand(1, *FORM, generator=stream())
    how = gradients.Search(200, gradients.Start.GREY, prior, signed_adam=signed_adam)
    found = gradients.search(lambda pixels, _: 1e-9 * (pixels - wanted).square().sum(), LABELS, FORM, 2, how, stream())
    assert (found.pixels - wanted).abs().max() < 0.02
    assert found.diverged == 0


def test_searched_labels_reach_the_right_class() -> None:
    asked: list[torch.Tensor] = []

    def wants_class_one(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        asked.append(labels.detach())
        if labels.dim() == 1:
            return pixels.square().sum() + 1
        return pixels.square().sum() + (1 - labels[0, 1])

    gradients.search(
        wants_class_one, LABELS, FORM, 3, gradients.Search(100, gradients.Start.NOISE, soft_labels=True), stream()
    )
    assert asked[-1][0, 1] > 0.99


def test_the_best_restart_is_the_one_of_the_smallest_loss_and_lost_ones_are_counted() -> None:
    lost = torch.randn(1, *FORM, generator=stream())

    def only_the_second_is_finite(pixels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        is_first = (pixels.detach() - lost).abs().max() < 0.1
        return pixels.square().sum() * (float("nan") if is_first else 1.0)

    found = gradients.search(
        only_the_second_is_finite, LABELS, FORM, 2, gradients.Search(20, gradients.Start.NOISE, restarts=2), stream()
    )
    assert found.diverged == 0.5
    assert found.loss < 1e-3


def test_total_variation_by_hand() -> None:
    # Across: |1-0| and |0-1|, mean 1; down: |0-0|... of [[0, 1], [1, 0]]: |1-0|, |0-1|, mean 1.
    assert float(gradients.total_variation(torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]]))) == pytest.approx(2.0)
    assert float(gradients.total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))) == pytest.approx(1.0)


def test_channel_statistics_by_hand() -> None:
    # Channel 0 holds 0, 2: mean 1, deviation 1; channel 1 holds 3, 3: mean 3, deviation 0.
    found = gradients.channel_statistics(torch.tensor([[[0.0, 2.0], [3.0, 3.0]]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 3.0], [1.0, 0.0]]), atol=2e-4, rtol=0)


def test_distances_are_zero_at_the_truth_and_cosine_ignores_length() -> None:
    case = simulated_case(method="fedavg")
    model, train, parts = present(case.model()), case.truth.train, (Part.EXTRACTOR, Part.CLASSIFIER)
    pixels, other, label = train.images[:1] / 255.0, train.images[1:2] / 255.0, train.labels[:1]
    seen = gradients.batch_gradient(case.view.spec, model, pixels, label, parts)
    longer = gradients.BatchGradient(parts, tuple(3 * one for one in seen.values), 1)
    whole = whole_model(case.view.spec, model)
    features = gradients.linear_inputs(whole, pixels).detach()
    found = [by(whole, features) for by in (gradients.feature_distance, gradients.feature_angle)]
    for objective in (gradients.gradient_distance(whole, seen), *found):
        assert float(objective(pixels, label).detach()) == pytest.approx(0, abs=1e-6)
        assert float(objective(other, label).detach()) > 1e-3
    # |g - 3g|^2 / |3g|^2 = 4/9
    by_distance, by_cosine = (by(whole, longer) for by in (gradients.gradient_distance, gradients.cosine_distance))
    assert float(by_distance(pixels, label).detach()) == pytest.approx(4 / 9, rel=1e-3)
    assert float(by_cosine(pixels, label).detach()) == pytest.approx(0, abs=1e-5)
