"""Gates: bounds on an audit's figures, compared with the end of the confidence interval that speaks against the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from audit.errors import GateFormError
from audit.measures.figures import Figure, Outcome

_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*?)(_gain)?\s*<\s*(-?\d+(?:\.\d+)?)\s*")
FIGURES = ("label_l1", "label_accuracy", "psnr", "ssim", "rank", "reid", "mia_auc", "mia_tpr", "class_ssim", "memory_auc",
           "inverter_psnr", "inverter_ssim", "epsilon")  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """`NAME<BOUND` or `NAME_gain<BOUND`."""

    figure: str
    of_gain: bool
    bound: float

    def __str__(self) -> str:
        """As it is written."""
        return f"{self.figure}{'_gain' if self.of_gain else ''}<{self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    """A condition's outcome: the largest bound of a confidence interval over all settings, and where it was found."""

    condition: str
    passed: bool
    why: str


def parse_gate(text: str) -> tuple[Condition, ...]:
    """Read conditions, separated by commas: `reid_gain<0.02,mia_auc<0.60`.

    Raises:
        GateFormError: not of this form, or a figure that there is not; names it.
    """
    found = []
    for piece in filter(str.strip, text.split(",")):
        matched = _CONDITION.fullmatch(piece)
        if matched is None:
            raise GateFormError(f"gate {piece.strip()!r}: write NAME<NUMBER or NAME_gain<NUMBER, separated by commas")
        if matched[1] not in FIGURES:
            raise GateFormError(f"gate {piece.strip()!r}: no figure {matched[1]!r}; there are {', '.join(FIGURES)}")
        found.append(Condition(matched[1], matched[2] is not None, float(matched[3])))
    return tuple(found)


def judge(conditions: Sequence[Condition], outcomes: Sequence[Outcome]) -> tuple[Verdict, ...]:
    """Whether each condition holds: for every setting that a real attacker can have, by the upper end of the interval.

    Attacks on the update itself decide; where a figure has none, those on the gradient of one batch do. A figure that was not
    measured, or whose attack failed its own positive control, does not pass: nothing was shown.
    """
    return tuple(_judged(condition, outcomes) for condition in conditions)


def _judged(condition: Condition, outcomes: Sequence[Outcome]) -> Verdict:
    named = [(outcome, figure) for outcome in outcomes for figure in outcome.figures if figure.name == condition.figure]
    possible = [(outcome, figure) for outcome, figure in named if figure.is_possible]
    possible = [pair for pair in possible if pair[1].is_of_update] or possible
    if not possible:
        reasons = [f"{one.attack}: {one.skipped}" for one in outcomes if one.skipped]
        return Verdict(
            str(condition), passed=False, why=f"not measured ({'; '.join(reasons) or 'no attack was asked for it'})"
        )
    broken = next((one for one, _ in possible if not all(control.passed for control in one.controls)), None)
    if broken is not None:
        return Verdict(
            str(condition), passed=False, why=f"the positive control of {broken.attack} failed: nothing was shown"
        )
    worst = max((figure for _, figure in possible), key=lambda figure: _upper(condition, figure))
    upper = _upper(condition, worst)
    return Verdict(str(condition), passed=upper < condition.bound, why=f"at most {upper:.3g} (95 %): {worst.setting}")


def _upper(condition: Condition, figure: Figure) -> float:
    return (figure.gain if condition.of_gain else figure.value).high
