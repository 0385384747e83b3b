"""Figures of an update beside its cohort's by hand, and what a policy makes of them."""

import json

import numpy as np
import pytest

from coordinator.config import Action, FigureRule, RobustnessSettings
from coordinator.updates.robustness import (
    OUTPUT,
    Figures,
    Movement,
    Verdict,
    figures_of,
    merge_weights,
    sketches_of,
    verdict_of,
)
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.parts import Part

HONEST, SETTINGS = Figures(1.0, 0.6, 0.6), RobustnessSettings()


def movement(step: list[float], distance: float = 1.0) -> Movement:
    return Movement({Part.CLASSIFIER: distance}, {"classifier": np.array(step)})


def test_a_step_against_the_others_has_their_cosine_with_the_sign_flipped() -> None:
    # Unit steps: a = (1, 0), b = (0.8, 0.6), c = (0.6, 0.8), d = -a. Cosines of a: 0.8, 0.6, -1, median 0.6;
    # of b: 0.8, 0.96, -0.8, median 0.8; of c: 0.6, 0.96, -0.6, median 0.6; of d: -1, -0.8, -0.6, median -0.8.
    steps = {"a": [1.0, 0.0], "b": [8.0, 6.0], "c": [0.06, 0.08], "d": [-5.0, 0.0]}
    figures = figures_of({client: movement(step) for client, step in steps.items()})
    assert {client: each.direction for client, each in figures.items()} == pytest.approx(
        {"a": 0.6, "b": 0.8, "c": 0.6, "d": -0.8}
    )
    assert [each.typical_direction for each in figures.values()] == pytest.approx([0.6] * 4)
    assert [verdict_of(figures[client], SETTINGS, 4).action for client in "abcd"] == [None, None, None, "quarantine"]


def test_the_figures_do_not_depend_on_the_order_of_clients() -> None:
    updates = {client: movement([1.0, float(number)], number + 1.0) for number, client in enumerate("abc")}
    backwards = dict(reversed(updates.items()))
    assert figures_of(updates) == figures_of(backwards)


def test_distances_are_given_in_medians() -> None:
    updates = {"a": movement([1.0], 2.0), "b": movement([1.0], 3.0), "c": movement([1.0], 30.0)}
    assert figures_of(updates)["c"] == Figures(10.0, 1.0, 1.0)


def test_two_updates_are_no_cohort_to_compare_with() -> None:
    found = figures_of({"a": movement([1.0]), "b": movement([-1.0], 100.0)})
    assert found["b"] == Figures()
    assert verdict_of(found["b"], SETTINGS, 2) == Verdict()


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"norm": 3.1}, "3.1 times as long as the median (at most 3)"),
        ({"direction": 0.29}, "points away from the others' (cosine 0.29, median 0.60, at least 0.30)"),
        ({"direction": -0.11, "typical_direction": 0.4}, "at least -0.10"),  # below OPPOSITE
        ({"direction": -0.76, "typical_direction": 0.0}, "at least -0.54"),  # one of three against the two others
    ],
)
def test_each_figure_has_a_bound_from_which_on_an_update_is_odd(odd: dict[str, float], reason: str) -> None:
    verdict = verdict_of(Figures(**{**vars(HONEST), **odd}), SETTINGS, 5)
    assert verdict.action == "quarantine"
    assert reason in verdict.reasons[0]


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"norm": 2.9},
        {"direction": 0.31},
        {"direction": 0.06, "typical_direction": 0.59},  # a device with other classes than the others
        {"direction": -0.11, "typical_direction": -0.07},  # converged: steps have nothing in common
        {"direction": -0.14, "typical_direction": 0.39},
    ],
)
def test_within_the_bounds_nothing_happens(fine: dict[str, float]) -> None:
    assert verdict_of(Figures(**{**vars(HONEST), **fine}), SETTINGS, 5) == Verdict()


def test_the_absolute_cut_off_needs_five_updates() -> None:
    step = Figures(direction=-0.12, typical_direction=0.41)
    assert [verdict_of(step, SETTINGS, count).action for count in (3, 4, 5)] == [None, None, "quarantine"]


def test_the_strictest_action_counts_and_every_reason_is_kept() -> None:
    settings = RobustnessSettings(
        norm=FigureRule(bound=3.0, action="warn"), direction=FigureRule(bound=0.3, action="down-weight")
    )
    verdict = verdict_of(Figures(9.0, 0.1, 0.6), settings, 5)
    assert verdict.action == "down-weight"
    assert len(verdict.reasons) == 2


@pytest.mark.parametrize(("action", "weight"), [("warn", 100), ("down-weight", 10), ("quarantine", None)])
def test_an_action_decides_the_weight(action: Action, weight: int | None) -> None:
    verdicts = {"a": Verdict(), "b": Verdict(), "c": Verdict(action, ("odd",))}
    assert merge_weights({"a": 100, "b": 120, "c": 100}, verdicts, SETTINGS).get("c") == weight


def test_an_update_in_quarantine_has_no_part_in_the_median_that_caps_the_others() -> None:
    verdicts = {"a": Verdict(), "b": Verdict(), "c": Verdict("quarantine")}
    assert merge_weights({"a": 10, "b": 100, "c": 10**9}, verdicts, SETTINGS) == {"a": 10, "b": 30}


def test_cosines_of_sketches_are_those_of_the_steps_up_to_a_few_hundredths() -> None:
    random = np.random.default_rng(3)
    one, other = random.normal(size=(300, 200)), random.normal(size=(300, 200))
    mixed = 0.6 * one + 0.8 * other

    def sketch(weight: np.ndarray) -> np.ndarray:
        base: dict[Part, dict[str, Array]] = {
            Part.CLASSIFIER: {"w": np.ones((300, 200), np.float32), "count": np.array(3)}
        }
        parts = {Part.CLASSIFIER: {"w": (1.0 + weight).astype(np.float32), "count": np.array(10**6)}}
        found = sketches_of(parts, base, 7)
        assert set(found) == {"classifier", OUTPUT}
        return found["classifier"] / np.linalg.norm(found["classifier"])

    first, second, third = sketch(one), sketch(mixed), sketch(other)
    assert first @ second == pytest.approx(0.6, abs=0.05)
    assert first @ third == pytest.approx(0.0, abs=0.05)


def test_figures_are_stored_as_short_numbers_without_those_that_are_unknown() -> None:
    assert json.loads(json.dumps(Figures(norm=1.23456).as_json())) == {"norm": 1.2346}
