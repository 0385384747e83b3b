"""The GAN shows what a class looks like where the model gives it away, and gains nothing from an update without news."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from audit.attacks import class_inference
from audit.attacks.attack import Effort
from audit.attacks.class_inference import recognised, trained_judges
from audit.evidence.case import Case, Knowledge
from audit.evidence.networks import trained_alone
from audit.measures import Outcome, unit_pixels
from tests.support.audit.cases import WHOLE_MODEL, carried_out, outcome_of, simulated_case


def whole_model_case() -> Case:
    return simulated_case(**WHOLE_MODEL)


def attacked(case: Case, effort: Effort = Effort.QUICK) -> Outcome:
    return carried_out("class_inference", case, effort)


@pytest.mark.slow
def test_a_model_that_was_sent_whole_shows_what_the_class_looks_like() -> None:
    outcome = outcome_of("class_inference", **WHOLE_MODEL)
    (recognised, ssim), controls = outcome.figures, outcome.controls
    assert [(one.figure, one.passed) for one in controls] == [("class_recognised", True), ("class_ssim", True)]
    assert recognised.value.low > 0.4  # the digits of the other classes: below 0.1
    assert ssim.value.low > 0.45  # the mean image of the other classes: 0.33 to 0.36
    assert all("sent" in one.setting for one in outcome.figures)
    assert [one.samples for one in outcome.figures] == [200, 15]
    assert recognised.ceiling is not None
    assert recognised.ceiling > 0.7  # digits of the class that nobody trained on


@pytest.mark.slow
def test_an_update_equal_to_the_aggregate_before_the_round_gains_nothing() -> None:
    case = whole_model_case()
    silent = replace(case, view=replace(case.view, update=case.view.before.parts))
    for figure in attacked(silent).figures:
        assert figure.floor_is == "the same attack on the aggregate before the round"
        assert (figure.gain.value, figure.gain.low, figure.gain.high) == (0.0, 0.0, 0.0)


def test_the_aggregate_with_noise_is_as_far_from_it_as_the_update() -> None:
    case = whole_model_case()
    noised = class_inference.with_noise(case.view, torch.Generator().manual_seed(1))
    for part, weights in case.view.before.parts.items():
        for name, value in weights.items():
            sizes = [float((one.update[part][name] - value).norm()) for one in (case.view, noised)]
            assert sizes[1] == pytest.approx(sizes[0], rel=0.1 if value.numel() > 500 else 2)
    # Drawn part by part in the order of their names, so that a repetition in another process has the same noise.
    first = min(case.view.update)
    name, value = next(iter(case.view.before.parts[first].items()))
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    size = (case.view.update[first][name] - value).square().mean().sqrt()
    assert torch.equal(noised.update[first][name], value + size * noise)


@pytest.mark.slow
def test_the_first_update_that_knows_a_class_gains_over_every_trivial_guess_and_the_aggregate_before() -> None:
    case = whole_model_case()
    start = case.view.start()
    update = trained_alone(case.view, start, case.truth.train, case.streams, 30)
    view = replace(case.view, update=update, before=replace(case.view.before, parts=start))
    recognised, ssim = attacked(replace(case, view=view)).figures
    assert recognised.gain.low > 0.2
    assert ssim.gain.low > 0.05


@pytest.mark.slow
def test_the_control_fails_when_the_attack_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_inference, "descend", lambda optimiser, loss: None)
    assert [one.passed for one in attacked(whole_model_case()).controls] == [False, False]


@pytest.mark.slow
def test_a_judge_that_knows_no_class_fails_the_control_of_its_own_figure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_inference, "recognised", lambda judges, some, target: np.full(len(some), 0.1))
    outcome = attacked(whole_model_case())
    assert [one.passed for one in outcome.controls] == [False, True]
    assert not outcome.is_proven("class_recognised")
    assert outcome.is_proven("class_ssim")


def test_judges_recognise_real_images_of_a_class_and_depend_on_their_own_images_alone() -> None:
    case = whole_model_case()
    other = replace(case.view, update={}, before=replace(case.view.before, parts={}))
    unseen, found = case.truth.held_out, []
    for view in (case.view, other):
        judges = trained_judges(view, case.truth.train, 2, 10, case.streams, lambda: None)
        found.append(recognised(judges, unit_pixels(unseen.images), 3))
    mine = (unseen.labels == 3).numpy()
    assert found[0][mine].mean() > 0.7
    assert found[0][~mine].mean() < 0.1
    assert np.array_equal(found[0], found[1])


@pytest.mark.slow
def test_the_classifier_alone_needs_an_estimated_extractor_and_says_so() -> None:
    case = simulated_case(method="fedsplit", data="digits", images_per_client=200, local_epochs=4)
    for figure in attacked(case).figures:
        assert "surrogate" in figure.setting
        assert Knowledge.AUXILIARY in figure.knowledge
        assert Knowledge.PRIVATE not in figure.knowledge


@pytest.mark.slow
def test_the_default_effort_adds_the_public_start_and_what_the_true_extractor_would_give() -> None:
    outcome = attacked(simulated_case(method="fedcg", data="digits", network="cnn_bn"), Effort.DEFAULT)
    settings = ["extractor: surrogate", "extractor: start of the public seed", "extractor: true"]
    assert [one.setting for one in outcome.figures] == settings * 2
    assert [one.is_possible for one in outcome.figures] == [True, True, False] * 2


def test_the_attacker_has_no_image_of_the_class_that_the_device_trained_on_most() -> None:
    case = whole_model_case()
    target = class_inference.target_class(case.truth)
    counts = case.truth.train.label_counts()
    assert counts[target] == max(counts)
    assert case.view.auxiliary is not None
    for most, known in ((50, 50), (10_000, int((case.view.auxiliary.labels != target).sum()) // 2)):
        view, kept = class_inference.without_class(case.view, target, most, torch.Generator().manual_seed(0))
        assert view.auxiliary is not None
        assert len(view.auxiliary) == known
        assert target not in view.auxiliary.labels
        assert target in kept.labels
        assert len(kept) + known == len(case.view.auxiliary)


def test_the_class_fake_is_one_logit_more_and_leaves_the_others_as_they_were() -> None:
    linear = nn.Linear(4, 3)
    linear.load_state_dict({"weight": torch.arange(12.0).reshape(3, 4) - 5, "bias": torch.arange(3.0)})
    classifier = nn.Sequential(nn.Flatten(), nn.Sequential(linear))
    inputs = torch.arange(8.0).reshape(2, 4)
    before = classifier(inputs).detach()
    after = class_inference.widened(classifier, 3)(inputs)
    assert torch.equal(after[:, :3], before)  # whole numbers: no sum is rounded
    assert torch.equal(after[:, 3], torch.zeros(2))


def test_class_ssim_is_the_mean_over_the_guesses_for_each_image() -> None:
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    # Each image is one of the two guesses: the mean of 1 and of the SSIM between the two, which is symmetric.
    first, second = class_inference.class_ssim(images, images)
    (between,) = class_inference.class_ssim(images[:1], images[1:])
    assert first == pytest.approx((1 + between) / 2)
    assert second == pytest.approx(first)
    assert isinstance(first, np.floating)
