"""Gates: bounds on an audit's figures, compared with the end of the confidence interval that speaks against the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from audit.measures.figures import Figure, Outcome
from audit.report.conditions import FIGURES as FIGURES
from audit.report.conditions import Condition
from audit.report.conditions import parse_gate as parse_gate
from fedcg.wire.parts import MAX_GAIN, AuditFigure


@dataclass(frozen=True)
class Verdict:
    """A condition's outcome: the largest bound of a confidence interval over all settings, and where it was found."""

    condition: str
    passed: bool
    why: str


def judge(conditions: Sequence[Condition], outcomes: Sequence[Outcome]) -> tuple[Verdict, ...]:
    """Whether each condition holds: for every setting that a real attacker can have, by the upper end of the interval.

    Attacks on the update itself decide; where a figure has none, those on the gradient of one batch do. A figure that was not
    measured, or whose own positive control failed, does not pass: nothing was shown.
    """
    return tuple(_judged(condition, outcomes) for condition in conditions)


def _judged(condition: Condition, outcomes: Sequence[Outcome]) -> Verdict:
    possible, passed = _deciding(condition.figure, outcomes), False
    broken = next((one for one, _ in possible if not one.is_proven(condition.figure)), None)
    if not possible:
        reasons = [f"{one.attack}: {one.skipped}" for one in outcomes if one.skipped]
        why = f"not measured ({'; '.join(reasons) or 'no attack was asked for it'})"
    elif broken is not None:
        why = f"the positive control of {broken.attack} failed: nothing was shown"
    else:
        worst = max((figure for _, figure in possible), key=lambda figure: _upper(condition, figure))
        upper = _upper(condition, worst)
        passed, why = upper < condition.bound, f"at most {upper:.3g} (95 %): {worst.setting}"
    return Verdict(str(condition), passed, why)


def _upper(condition: Condition, figure: Figure) -> float:
    return (figure.gain if condition.of_gain else figure.value).high


def _deciding(name: str, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Figure]]:
    named = [(outcome, figure) for outcome in outcomes for figure in outcome.figures if figure.name == name]
    possible = [(outcome, figure) for outcome, figure in named if figure.is_possible]
    return [pair for pair in possible if pair[1].is_of_update] or possible


def largest_gains(outcomes: Sequence[Outcome]) -> dict[AuditFigure, float]:
    """By figure, the upper end of the gain's interval over the settings that decide about a gate, within `MAX_GAIN`.

    Figures whose positive control failed are left out: they show nothing.
    """
    found = {
        name: [figure.gain.high for _, figure in _deciding(name, [one for one in outcomes if one.is_proven(name)])]
        for name in FIGURES
    }
    return {
        name: min(max(*highs, -MAX_GAIN), MAX_GAIN)
        for name, highs in found.items()
        if highs and not any(map(isnan, highs))
    }
