"""Findings made by hand, one for every result that a report knows."""

import torch

from audit.attacks.attack import Attack
from audit.evidence.case import Knowledge
from audit.measures import Control, Curve, Figure, Interval, Outcome, Pictures, png
from audit.report import Finding, Subject, Verdict, finding_of

SUBJECT = Subject(
    "demo", "fedcg", "lenet5", "client-1", 3, {"classifier": 61_000, "generator": 120_000}, ("accuracy", "examples"), (332, 139),
    0, ("3 frames that the observer could not keep up with",), {"effort": "quick", "seed": 0}, "fedcg audit run --updates <here>",
    "public spec seed",
)  # fmt: skip
VERDICTS = (Verdict("reid_gain<0.02", passed=False, why="at most 0.31 (95 %): classifier, public start"),)


def figure(
    name: str, gain: Interval, *, given: bool = False, unit: str = "share", setting: str = "classifier alone"
) -> Figure:
    """A figure with this gain over a floor of 0.1."""
    knowledge = (Knowledge.UPDATE, Knowledge.PRIVATE) if given else (Knowledge.UPDATE, Knowledge.START)
    value = Interval(0.1 + gain.value, 0.1 + gain.low, 0.1 + gain.high)
    return Figure(name, f"title of {name}", setting, knowledge, value, 0.1, "a random guess", gain, 200, 0.9, unit)


def attack(name: str) -> Attack:
    """An attack that is only described."""
    return Attack(name, f"Attack {name}", f"Does {name} get something?", "Paper, eq. 1", lambda _: ())


def findings() -> tuple[Finding, ...]:
    """One that leaked (with pictures and a curve), one that did not, one without a control that passed, one that was not tried."""
    image = png(torch.linspace(0, 1, 3 * 8 * 8).view(3, 8, 8))
    passed = Control("the whole model, one image", 24.1, "at least 3 dB over the best guess", passed=True)
    failed = Control("a planted generator", 0.5, "over 0.9", passed=False)
    pictures = Pictures(
        "Reconstructions <b>", (("true", (image, image)), ("guess", (image,))), (("", ""), ("12.1 dB",))
    )
    curve = Curve(
        "ROC", "false positives", "true positives", {"attack": ((0.001, 0.0), (0.1, 0.4), (1.0, 1.0))}, log_x=True
    )
    leaked = Outcome(
        "reidentification",
        (figure("reid", Interval(0.2, 0.1, 0.31)), figure("reid", Interval(0.8, 0.7, 0.9), given=True, setting="true extractor")),
        (passed,), (pictures,), (curve,), ("A note.",), seconds=3.2,
    )  # fmt: skip
    quiet = Outcome("membership", (figure("mia_auc", Interval(0.0, -0.02, 0.02), unit=""),), (passed,))
    broken = Outcome("memorisation", (figure("memory_auc", Interval(0.0, -0.02, 0.0), unit=""),), (failed,))
    skipped = Outcome("epsilon", skipped="the attacker needs labelled images of the same kind: give --auxiliary")
    outcomes = (leaked, quiet, broken, skipped)
    return tuple(finding_of(attack(outcome.attack), outcome) for outcome in outcomes)
