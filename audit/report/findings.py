"""From outcomes to what a report states: per attack a verdict and the figure that stands for it, and the facts of the update."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy.stats import norm

from audit.attacks.attack import Attack
from audit.evidence.case import Case
from audit.evidence.device_data import SECRET_FILE
from audit.measures.figures import CONFIDENCE, Figure, Outcome
from audit.report.gate import Verdict

REPORT_FORMAT = 1


class Result(str, Enum):
    """The result of an attack; the values are words for a report."""

    LEAKED = "something came back"
    HYPOTHETICAL = "something would come back from the gradient of one batch, which is not sent"
    NOTHING = "nothing beyond guessing"
    UNPROVEN = "not proven: its positive control failed"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Subject:
    """What was audited, in facts.

    Attributes:
        sent: numbers sent per part; `size`: bytes of the update's artifact, None where only its content is known.
        gaps: what the recording lacks.
        images: (trained on, held out) of the device, `auxiliary` of the attacker.
        settings: seed, effort, attacks asked for.
        command: to repeat it.
        start: where the private networks' first weights come from.
    """

    federation: str
    method: str
    network: str
    client: str
    round: int
    sent: Mapping[str, int]
    fields: tuple[str, ...]
    images: tuple[int, int]
    auxiliary: int
    gaps: tuple[str, ...]
    settings: Mapping[str, Any]
    command: str
    start: str


@dataclass(frozen=True)
class Finding:
    """An attack with its outcome and what it comes to."""

    attack: Attack
    outcome: Outcome
    result: Result
    headline: Figure | None

    def summary(self) -> str:
        """One line for a terminal."""
        if self.headline is None:
            return f"{self.result.value} ({self.outcome.skipped})"
        found = self.headline
        return (
            f"{self.result.value}; {found.title} {as_number(found.value.value, found.unit)} against {as_number(found.floor, found.unit)} "
            f"for {found.floor_is} ({found.setting})"
        )


def as_number(value: float | None, unit: str = "") -> str:
    """A figure's number as a person reads it: shares in percent."""
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.3g}{f' {unit}' if unit else ''}"


def subject_of(
    case: Case, gaps: Sequence[str], settings: Mapping[str, Any], command: str, private: Path | None
) -> Subject:
    """The facts of an audited update; `private` is the device's store, where it is at hand."""
    view, truth = case.view, case.truth
    return Subject(
        view.spec.federation,
        view.spec.method,
        view.spec.network.split,
        view.client,
        view.round,
        {
            part.value: sum(tensor.numel() for tensor in weights.values())
            for part, weights in sorted(view.update.items())
        },
        tuple(sorted(field.value for field in view.report.fields())),
        (len(truth.train), len(truth.held_out)),
        0 if view.auxiliary is None else len(view.auxiliary),
        tuple(gaps),
        settings,
        command,
        view.spec.network.private_start(None if private is None else (private / SECRET_FILE).exists()),
    )


def finding_of(attack: Attack, outcome: Outcome) -> Finding:
    """What an outcome comes to.

    The possible setting whose gain is most surely above 0 stands for it: of the update itself if one is; else of a batch's gradient.
    Of many settings one comes out above 0 by chance, so the error of 5 % is divided among them (Bonferroni, intervals read as a normal's).
    Without a gain, a figure whose positive control failed stands for it only where no figure's control passed.
    """
    possible = [figure for figure in outcome.figures if figure.is_possible]
    if outcome.skipped is not None or not possible:
        return Finding(attack, outcome, Result.NOT_TRIED, None)
    of_update = [figure for figure in possible if figure.is_of_update]
    for figures, result in ((of_update, Result.LEAKED), (possible, Result.HYPOTHETICAL)):
        leaks = [figure for figure in figures if _widened_low(figure, len(figures)) > 0]
        if leaks:
            return Finding(attack, outcome, result, max(leaks, key=_share_of_range))
    deciding = of_update or possible
    proven = [figure for figure in deciding if outcome.is_proven(figure.name)]
    headline = max(proven or deciding, key=_share_of_range)
    return Finding(attack, outcome, Result.NOTHING if proven else Result.UNPROVEN, headline)


def _widened_low(figure: Figure, settings: int) -> float:
    """The lower end of the gain's interval, were it to hold for so many settings together."""
    error = (1 - CONFIDENCE) / 2
    widening = norm.isf(error / settings) / norm.isf(error)
    return float(figure.gain.value - widening * (figure.gain.value - figure.gain.low))


def _share_of_range(figure: Figure) -> float:
    """The gain's lower bound as a share of what could be gained at all, so that dB and shares compare."""
    whole = abs((figure.ceiling if figure.ceiling is not None else 1.0) - figure.floor)
    return figure.gain.low / max(whole, 1e-9)


def report_of(subject: Subject, findings: Sequence[Finding], gates: Sequence[Verdict]) -> dict[str, Any]:
    """The whole report as JSON values (`report.json`); pictures stay in the folder of outcomes and in the page."""
    return {
        "format": REPORT_FORMAT,
        "subject": asdict(subject),
        "versions": {name: version(name) for name in ("fedcg-edge", "torch", "numpy", "scikit-image")}
        | {"python": platform.python_version()},
        "attacks": [
            {
                "name": finding.attack.name,
                "title": finding.attack.title,
                "source": finding.attack.source,
                "result": finding.result.value,
                "seconds": finding.outcome.seconds,
                "skipped": finding.outcome.skipped,
                "figures": [
                    {
                        **asdict(figure),
                        "knowledge": sorted(figure.knowledge),
                        "is_ceiling": not figure.is_possible,
                        "is_of_update": figure.is_of_update,
                    }
                    for figure in finding.outcome.figures
                ],
                "controls": [asdict(control) for control in finding.outcome.controls],
                "notes": list(finding.outcome.notes),
            }
            for finding in findings
        ],
        "gates": [asdict(verdict) for verdict in gates],
    }
