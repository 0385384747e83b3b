"""Gradient inversion reconstructs what leaks, gains nothing where nothing does, and its controls notice a broken attack."""

from dataclasses import replace

import pytest
import torch

from audit.attacks import gradient_inversion
from audit.attacks.attack import Effort
from audit.evidence.case import Case, Knowledge
from audit.measures import Outcome, Reconstructions, trivial_images
from audit.techniques.gradients import Found, Objective
from fedcg.wire.parts import Part
from tests.support.audit.cases import carried_out, outcome_of, simulated_case


def run(case: Case) -> Outcome:
    return carried_out("inversion", case)


def in_the_blink_of_an_eye(monkeypatch: pytest.MonkeyPatch, pixels: float) -> None:
    """Every search ends at once with one constant image."""

    def constant(objective: Objective, labels: torch.Tensor, form: tuple[int, int, int], *_: object) -> Found:
        found = torch.full((len(labels), *form), pixels)
        assert objective(found, labels).isfinite()
        return Found(found, 0.0, 0.0)

    monkeypatch.setattr(gradient_inversion, "search", constant)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcg", "fedavg", "fedsplit"])
def test_the_attack_runs_its_controls_succeed_and_every_figure_has_its_floor(method: str) -> None:
    outcome = outcome_of("inversion", method=method)
    assert [control.passed for control in outcome.controls] == [True, True]
    words = [(figure.name, figure.setting) for figure in outcome.figures]
    assert len(set(words)) == len(words)
    assert {name for name, _ in words} == {"psnr", "ssim", *(["rank"] if method != "fedavg" else [])}
    for figure in outcome.figures:
        assert figure.gain.low <= figure.gain.value <= figure.gain.high
        assert figure.value.value - figure.floor == pytest.approx(figure.gain.value, abs=1e-6)
    assert outcome.pictures


def test_a_control_reconstructs_single_images_at_initial_weights() -> None:
    case = simulated_case(method="fedsplit")
    images = case.truth.train.rows(range(2))
    match = gradient_inversion.Match.FEATURES
    control = gradient_inversion.control_of(case, images, match, Effort.QUICK, case.streams.at("control"), lambda: None)
    assert control.passed
    assert control.value > 20


def test_the_controls_fail_when_the_search_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = run(simulated_case(method="fedsplit"))
    assert [control.passed for control in outcome.controls] == [False, False]
    psnr = [figure for figure in outcome.figures if figure.name == "psnr"]
    assert all(figure.gain.value <= 0 for figure in psnr)


def test_where_the_whole_model_is_sent_the_ceiling_is_the_best_setting_with_a_prior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = run(simulated_case(method="fedavg"))
    for name in ("psnr", "ssim"):
        figures = [figure for figure in outcome.figures if figure.name == name]
        best = max(figure.value.value for figure in figures if "with prior" in figure.setting)
        assert [figure.ceiling for figure in figures] == [best] * len(figures)


def test_a_classifier_alone_determines_at_most_as_many_pixels_as_there_are_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = run(simulated_case(method="fedsplit"))
    (rank,) = [figure for figure in outcome.figures if figure.name == "rank"]
    assert 0 < rank.value.value <= 400 / (32 * 32)


@pytest.mark.parametrize("effort", list(Effort))
@pytest.mark.parametrize("method", ["fedcg", "fedavg", "fedsplit"])
def test_settings_have_words_of_their_own_and_name_the_knowledge_that_they_take(method: str, effort: Effort) -> None:
    view = simulated_case(method=method).view
    settings = gradient_inversion.settings_of(view, effort)
    assert len({one.words for one in settings}) == len(settings)
    for setting in settings:
        assert (Knowledge.PRIVATE in setting.knowledge) == ("extractor true" in setting.words)
        assert (Knowledge.AUXILIARY in setting.knowledge) == ("surrogate" in setting.words)
    assert not any(
        "surrogate" in one.words for one in gradient_inversion.settings_of(replace(view, auxiliary=None), effort)
    )


def test_the_rounds_weight_difference_is_the_gradient_that_moved_it() -> None:
    view = simulated_case(method="fedsplit").view
    seen = gradient_inversion.round_difference(view, (Part.CLASSIFIER,))
    moved = view.before.parts[Part.CLASSIFIER]["5.bias"] - view.update[Part.CLASSIFIER]["5.bias"]
    torch.testing.assert_close(seen.values[-1], moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "single", "own"),
    [("fedavg", 9, "noise of variance 0.1"), ("fedcg", 11, "generator statistics (FedCG eq. 8), extractor surrogate")],
)
def test_batches_and_the_whole_round_are_tried_by_default(
    monkeypatch: pytest.MonkeyPatch, method: str, single: int, own: str
) -> None:
    in_the_blink_of_an_eye(monkeypatch, 0.5)
    outcome = carried_out("inversion", simulated_case(method=method), Effort.DEFAULT)
    settings = "\n".join(figure.setting for figure in outcome.figures)
    for words in ("batch of 4", "batch of 16", "weight difference of the round", own):
        assert words in settings
    assert {len(table.rows) for table in outcome.pictures} == {2, 1 + single}


def test_a_guess_that_is_the_floor_has_no_gain_and_shuffled_truth_has_none_either() -> None:
    case = simulated_case(method="fedsplit")
    images = case.truth.train.rows(range(8))
    pixels, stream = images.images / 255.0, torch.Generator().manual_seed(1)
    floors = {name: (guess, pixels) for name, guess in trivial_images(case.view, images, stream)}
    mean, _ = floors["the mean auxiliary image of its class"]
    of_floor = Reconstructions(mean, pixels, floors).figure("psnr", "", (), None, 1)
    assert (of_floor.gain.value, of_floor.gain.high) == (0, 0)
    perfect = Reconstructions((pixels + 0.01).clamp(0, 1), pixels, floors).figure("psnr", "", (), None, 1)
    assert perfect.gain.low > 3
    shuffled = Reconstructions(pixels.roll(1, 0), pixels, floors).figure("psnr", "", (), None, 1)
    assert shuffled.gain.value < 0


def test_a_batch_is_put_into_the_order_that_fits_best() -> None:
    truth = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gradient_inversion.in_best_order(truth[[2, 0, 3, 1]], truth), truth)
