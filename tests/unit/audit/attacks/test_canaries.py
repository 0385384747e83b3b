"""The one-run lower bound on ε: the formula by hand, canaries, and the attack on real local rounds."""

import math

import numpy as np
import pytest
import torch

from audit.attacks import canaries as module
from audit.attacks.attack import Effort
from audit.attacks.canaries import ATTACK, best_bound, epsilon_bound, make_canaries, p_value
from audit.evidence.case import Case
from audit.measures import Outcome
from tests.support.audit.cases import simulated_case


def test_one_right_guess_of_one_has_the_p_value_q_and_proves_nothing() -> None:
    epsilon = math.log(3)  # q = 3/4
    assert p_value(1, 1, 1, epsilon, 0.0) == pytest.approx(0.75)
    # 2 m δ · max_i Pr(1 - i <= B < 1) / i = 2 · 1 · 0.1 · Pr(B = 0) = 0.2 · 0.25
    assert p_value(1, 1, 1, epsilon, 0.1) == pytest.approx(0.75 + 0.05)
    assert epsilon_bound(1, 1, 1) == 0.0


def test_two_guesses_have_the_p_value_worked_by_hand() -> None:
    # q = 3/4, r = 2, v = 2: Pr(B >= 2) = 9/16; i = 1: Pr(B = 1) = 6/16; i = 2: (Pr(B = 1) + Pr(B = 0)) / 2 = 7/32. m = 5, δ = 0.01.
    assert p_value(5, 2, 2, math.log(3), 0.01) == pytest.approx(9 / 16 + 2 * 5 * 0.01 * 6 / 16)


def test_all_of_ten_right_rule_out_the_epsilon_at_which_q_to_the_tenth_is_five_percent() -> None:
    q = 0.05**0.1
    assert epsilon_bound(10, 10, 10, delta=0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


def test_no_right_guess_is_certain_and_bounds_nothing() -> None:
    assert p_value(10, 10, 0, 1.0, 1e-5) == 1.0
    assert epsilon_bound(10, 10, 0) == 0.0
    assert epsilon_bound(10, 0, 0) == 0.0


def test_the_bound_grows_with_right_guesses_and_falls_with_delta_and_with_abstentions_counted_in() -> None:
    by_right = [epsilon_bound(100, 50, right) for right in range(25, 51, 5)]
    assert by_right == sorted(by_right)
    assert by_right[-1] > 2.0
    by_delta = [epsilon_bound(100, 50, 48, delta) for delta in (0.0, 1e-5, 1e-3, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[0] > by_delta[-1]
    assert epsilon_bound(10_000, 50, 48, 1e-3) < epsilon_bound(100, 50, 48, 1e-3)


def test_randomised_response_exceeds_its_own_epsilon_in_less_than_five_percent_of_audits() -> None:
    drawn, epsilon = np.random.default_rng(7), 1.0
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    bound = {right: epsilon_bound(100, 100, right, 0.0) for right in range(50, 101)}
    bounds = [bound[int(right)] for right in drawn.binomial(100, q, size=400)]
    assert np.mean(np.array(bounds) > epsilon) < 0.07  # 5 % and two standard errors of 400 audits
    assert np.mean(bounds) > 0.5


def test_scores_that_know_the_coin_give_a_large_bound_and_scores_of_nothing_give_none() -> None:
    drawn = np.random.default_rng(1)
    included = drawn.random(200) < 0.5
    noise = drawn.normal(size=200)
    assert best_bound(included + 0.01 * noise, included) > 2.0
    assert best_bound(noise, included) == 0.0
    assert best_bound(-(included + 0.01 * noise), included) == 0.0


def test_canaries_follow_from_the_stream_and_have_the_form_of_the_images() -> None:
    case = simulated_case(method="fedavg")
    first, again = (make_canaries(case.view.spec, 20, case.streams.at("x")) for _ in range(2))
    image = case.view.spec.image
    assert first.images.shape == (20, image.channels, image.height, image.width)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert len({one.numpy().tobytes() for one in first.images}) == 20


def _run(case: Case) -> Outcome:
    return ATTACK.run(case, Effort.DEFAULT, lambda done, steps: None)


@pytest.mark.slow
def test_a_round_of_many_epochs_sent_whole_has_a_bound_over_that_of_guesses_without_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = simulated_case(method="fedavg", local_epochs=60, rounds=2)
    state = torch.get_rng_state()
    found = _run(case)
    (figure,) = found.figures
    assert figure.setting == "extractor: sent (whole model)"
    assert figure.value.value > 0.5
    assert figure.floor < 0.2
    assert figure.gain.value == pytest.approx(figure.value.value - figure.floor)
    assert figure.samples == 200
    assert found.controls[0].passed
    assert torch.equal(state, torch.get_rng_state())

    monkeypatch.setattr(module, "confidence", lambda model, images: np.full(len(images), 0.1))
    broken = _run(case)
    assert not broken.controls[0].passed
    assert broken.figures[0].value.value == 0.0


@pytest.mark.slow
def test_where_the_extractor_stays_there_is_a_bound_per_estimate_and_the_ceiling_of_the_true_one() -> None:
    case = simulated_case(method="fedcg")
    found = _run(case)
    assert [one.setting for one in found.figures] == ["extractor: start of the public seed", "extractor: surrogate"]
    assert all(one.ceiling is not None and one.name == "epsilon" for one in found.figures)
    assert found.controls[0].passed
    again = _run(case)
    assert [one.value for one in again.figures] == [one.value for one in found.figures]
