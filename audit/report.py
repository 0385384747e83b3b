"""The report of an audit: a result and a headline figure for each attack, the gates, and one self-contained HTML page without external files.

A gate is compared with the unfavourable end of the confidence interval.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from datetime import datetime, timezone
from enum import Enum
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from audit.attacks.attack import Attack
from audit.choices import FIGURES, Condition
from audit.errors import AuditError
from audit.evidence import Case
from audit.evidence.device_data import SECRET_FILE
from audit.measures import Figure, Interval, Outcome, proportion
from fedcg.config_file import read_values
from fedcg.files import replace_durably
from fedcg.values import Value
from fedcg.wire.parts import MAX_GAIN, AuditFigure
from fedcg.wire.sealed_numbers import number_count

REPORT_FORMAT = 1
LEVEL = 0.01
"""Share of audits of updates that reveal nothing in which a report may find a leak by chance."""
_LEAST_SHOWN = 0.001
REPORT_FILE, PAGE_FILE = "report.json", "report.html"


class Result(str, Enum):
    """The result of an attack. The values are the words of the report."""

    LEAKED = "information leaked"
    HYPOTHETICAL = "would leak from the gradient of one batch, which is not sent"
    NOTHING = "no better than guessing"
    UNPROVEN = "inconclusive: the positive control failed"
    UNTESTED = "inconclusive: too few images or classes for a test against chance"
    NOT_TRIED = "not tried"


class Subject(Value):
    """Facts about the audited update.

    Attributes:
        sent: count of numbers sent, by part.
        gaps: missing data in the recording.
        images: (trained on, held out) of the device, `auxiliary` of the attacker.
        settings: seed, effort, requested attacks.
        command: repeats the audit.
        start: origin of the private networks' initial weights.
        seconds: of all attacks together, as measured; 0 if unknown.
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
    seconds: float = 0.0


class Finding(Value):
    """An attack, its outcome, and the result with its headline figure.

    Attributes:
        chances: by figure, the probability of such a gain anywhere in the report if no update reveals anything (Holm's adjusted p).
        of_update: the result from the update itself, if `result` is of a batch's gradient.
    """

    attack: Attack
    outcome: Outcome
    result: Result
    headline: Figure | None
    chances: Mapping[Figure, float] = field(default_factory=dict)
    of_update: Result | None = None

    @property
    def words(self) -> str:
        """The result, also that from the update itself."""
        return self.result.value + ("" if self.of_update is None else f"; the update itself: {self.of_update.value}")

    @property
    def is_inconclusive(self) -> bool:
        """Whether nothing is known of the update itself."""
        return (self.of_update or self.result) in (Result.UNPROVEN, Result.UNTESTED)

    def summary(self) -> str:
        """Return one line for a terminal."""
        if self.headline is None:
            return f"{self.words} ({self.outcome.skipped})"
        found = self.headline
        return (
            f"{self.words}; {found.title} {as_number(found.value.value, found.unit)} against {as_number(found.floor, found.unit)} "
            f"for {found.floor_is} ({found.setting}; chance: {as_chance(self.chances.get(found))})"
        )


def as_chance(probability: float | None) -> str:
    """Format a corrected probability."""
    if probability is None:
        return "not tested"
    return "below " * (probability < _LEAST_SHOWN) + as_number(max(probability, _LEAST_SHOWN), "share")


def as_number(value: float | None, unit: str = "") -> str:
    """Format a figure's number; shares are in percent."""
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.3g}{f' {unit}' if unit else ''}"


def subject_of(
    case: Case,
    gaps: Sequence[str],
    settings: Mapping[str, Any],
    command: str,
    private: Path | None,
    seconds: float = 0.0,
) -> Subject:
    """Return the facts of an audited update; `private` is the device's store, if given."""
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
        }
        | {
            f"{part.value}, behind the cohort's masks": number_count(view.spec.layouts[part])
            for part in view.spec.sealed_in(view.round)
        },
        tuple(sorted(field.value for field in view.report.fields())),
        (len(truth.train), len(truth.held_out)),
        0 if view.auxiliary is None else len(view.auxiliary),
        tuple(gaps),
        settings,
        command,
        view.spec.network.private_start(None if private is None else (private / SECRET_FILE).exists()),
        round(seconds, 1),
    )


def corrected(outcomes: Sequence[Outcome]) -> dict[tuple[str, Figure], float]:
    """Return, by attack and figure, the probability of such a gain anywhere in the report if the update reveals nothing.

    Holm (1979) over every figure of a real attacker that has a test, of all attacks, also those on the gradient of one
    batch. Like Bonferroni's it holds for dependent tests; after the first leak it finds more. Tests that can't show a
    leak, as their smallest p is above the level divided by the number of tests that can, are left out (Tarone 1990).
    """
    tested = [(one.attack, figure) for one in outcomes for figure in one.figures if figure.is_possible]
    tested = sorted((pair for pair in tested if pair[1].p is not None), key=lambda pair: pair[1].least_p)
    able = next((n for n in range(1, len(tested) + 1) if sum(one.least_p <= LEVEL / n for _, one in tested) <= n), 0)
    tested = [pair for pair in tested if pair[1].least_p <= LEVEL / max(able, 1)]
    ordered = sorted((figure.p or 0.0, place) for place, (_, figure) in enumerate(tested))
    found, largest = {}, 0.0
    for number, (probability, place) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - number) * probability))
        found[tested[place]] = largest
    return found


def findings_of(attacks: Sequence[Attack], outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return the findings of all outcomes of a report together.

    Something leaked where a gain is too large for chance: of audits of updates that reveal nothing, at most `LEVEL` have
    such a finding anywhere. The headline is the strongest figure on the update itself if that leaks, else on a batch's
    gradient. Without a leak, a figure with a failed positive control is the headline only if no figure's control passed.
    """
    chances = corrected(outcomes)
    return tuple(
        _finding(attack, outcome, {figure: p for (name, figure), p in chances.items() if name == outcome.attack})
        for attack, outcome in zip(attacks, outcomes, strict=True)
    )


def _finding(attack: Attack, outcome: Outcome, chances: Mapping[Figure, float]) -> Finding:
    possible = [figure for figure in outcome.figures if figure.is_possible]
    if outcome.skipped is not None or not possible:
        return Finding(attack, outcome, Result.NOT_TRIED, None)
    of_update = [figure for figure in possible if figure.is_of_update]
    result, headline = _without_a_leak(outcome, of_update or possible, chances)
    for figures, found in ((of_update, Result.LEAKED), (possible, Result.HYPOTHETICAL)):
        leaks = [one for one in figures if chances.get(one, 1.0) <= LEVEL and one.gain.value > 0]
        if leaks:
            rest = result if found is Result.HYPOTHETICAL and of_update else None
            return Finding(attack, outcome, found, min(leaks, key=_strongest), chances, rest)
    return Finding(attack, outcome, result, headline, chances)


def _without_a_leak(
    outcome: Outcome, deciding: Sequence[Figure], chances: Mapping[Figure, float]
) -> tuple[Result, Figure]:
    tested = [one for one in deciding if one in chances]
    proven = [one for one in tested if outcome.is_proven(one.name)]
    result = Result.NOTHING if proven else Result.UNPROVEN if tested else Result.UNTESTED
    return result, min(proven or tested or deciding, key=_strongest)


def _strongest(figure: Figure) -> tuple[float, float]:
    """The least likely by chance first, then the largest share of the possible gain, so that dB and shares are comparable."""
    whole = abs((1.0 if figure.ceiling is None else figure.ceiling) - figure.floor)
    return (1.0 if figure.p is None else figure.p), -figure.gain.low / max(whole, 1e-9)


def report_of(subject: Subject, findings: Sequence[Finding], gates: Sequence[GateResult]) -> dict[str, Any]:
    """Return the whole report as JSON values (`report.json`); pictures are only in the outcomes' folder and the page."""
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
                "result_of_update": None if finding.of_update is None else finding.of_update.value,
                "evidence": evidence(finding, str(subject.settings.get("effort")), subject.images[0]),
                "seconds": finding.outcome.seconds,
                "skipped": finding.outcome.skipped,
                "figures": [
                    {
                        **asdict(figure),
                        "knowledge": sorted(figure.knowledge),
                        "is_ceiling": not figure.is_possible,
                        "is_of_update": figure.is_of_update,
                        "p_corrected": finding.chances.get(figure),
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


DETECTION_FILE = Path(__file__).with_name("detection.toml")
"""The measured power and false alarms, `[[smallest]]` and `[[false_alarm]]`; written by `fedcg bench privacy`."""


def evidence(finding: Finding, effort: str, images: int) -> str:
    """Return what planted leaks and updates without a leak showed about this result; empty if it is neither.

    Between measured numbers of training images the smallest leak is interpolated in their logarithm. More images than
    measured find smaller leaks, so the last one holds; for fewer there is none. If too few plants of any strength were
    found, that is told, with the largest number found.
    """
    mine, measured = {"attack": finding.attack.name, "effort": effort}, read_values(DETECTION_FILE, AuditError)[1]
    smallest, missed, alarms = (
        [row for row in measured[name] if mine.items() <= row.items()] for name in ("smallest", "missed", "false_alarm")
    )
    if finding.result is Result.LEAKED:
        rates = [(f"{row['red']} of {row['of']}", proportion(row["red"], row["of"]).high) for row in alarms]
        told = [f"{rate} audits without a leak (95 %: at most {as_number(high, 'share')})" for rate, high in rates]
        return f"False alarms: {'; '.join(told) or 'not measured'}"
    if (finding.of_update or finding.result) is not Result.NOTHING:
        return ""
    told = []
    for figure in dict.fromkeys(row["figure"] for row in smallest):
        rows = sorted((row["images"], row["leak"], row["plants"]) for row in smallest if row["figure"] == figure)
        if rows[0][0] <= images:
            sizes, leaks, plants = zip(*rows, strict=True)
            leak = np.interp(np.log(images), np.log(sizes), leaks)
            told.append(f"{figure} {leak:.3g} ({min(plants)} plants)")
    weak = {row["plant"]: f"{row['plant']} {row['found']} of {row['of']}" for row in missed if row["images"] <= images}
    if weak and not told:
        return f"Weak at this effort: of planted leaks of the strongest kind it found {'; '.join(weak.values())}"
    return f"Smallest leak found in 80 % of plants: {'; '.join(told) or f'not measured for {images} images'}"


class GateResult(Value):
    """The outcome of a gate condition, and the reason: the largest upper bound over all settings, or why none was measured."""

    condition: str
    passed: bool
    why: str


def judge(conditions: Sequence[Condition], outcomes: Sequence[Outcome]) -> tuple[GateResult, ...]:
    """Check each condition against the upper end of the interval, in every setting that a real attacker can have.

    Attacks on the update itself decide. Without any for a figure, attacks on the gradient of one batch decide. A figure
    that was not measured, or whose positive control failed, does not pass, nor does any if an attack ended with an error.
    """
    return tuple(_judged(condition, outcomes) for condition in conditions)


def _judged(condition: Condition, outcomes: Sequence[Outcome]) -> GateResult:
    possible, passed = _deciding(condition.figure, outcomes), False
    failed = next((one for one in outcomes if one.has_failed), None)
    broken = next((one for one, _ in possible if not one.is_proven(condition.figure)), None)
    if not possible:
        reasons = [f"{one.attack}: {one.skipped}" for one in outcomes if one.skipped]
        why = f"not measured ({'; '.join(reasons) or 'no attack that measures it was requested'})"
    elif broken is not None:
        why = f"inconclusive, the positive control of {broken.attack} failed"
    elif failed is not None:
        why = f"inconclusive, {failed.attack} {failed.skipped}"
    else:
        worst = max(
            (figure for _, figure in possible), key=lambda figure: np.nan_to_num(_upper(condition, figure), nan=np.inf)
        )
        upper = _upper(condition, worst)
        passed, why = upper < condition.bound, f"at most {upper:.3g} (95 %): {worst.setting}"
    return GateResult(str(condition), passed, why)


def _upper(condition: Condition, figure: Figure) -> float:
    return (figure.gain if condition.of_gain else figure.value).high


def _deciding(name: str, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Figure]]:
    named = [(outcome, figure) for outcome in outcomes for figure in outcome.figures if figure.name == name]
    possible = [(outcome, figure) for outcome, figure in named if figure.is_possible]
    return [pair for pair in possible if pair[1].is_of_update] or possible


def largest_gains(outcomes: Sequence[Outcome]) -> dict[AuditFigure, float]:
    """Return, by figure, the largest upper end of the gain's interval over the settings that decide a gate, within `MAX_GAIN`.

    Figures with a failed positive control are left out.
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


_TEMPLATE = "report.html"


def write_report(
    folder: Path, subject: Subject, findings: Sequence[Finding], gates: Sequence[GateResult]
) -> dict[str, Any]:
    """Write `report.json` and the page, readable by the folder's owner only, and return the JSON values."""
    report = report_of(subject, findings, gates)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    replace_durably(folder / REPORT_FILE, json.dumps(report, indent=1))
    replace_durably(folder / PAGE_FILE, render(subject, findings, gates, made))
    return report


def render(subject: Subject, findings: Sequence[Finding], gates: Sequence[GateResult], made: str) -> str:
    """Render the page.

    Args:
        subject: what was audited.
        findings: per attack, in the order of the report.
        gates: verdicts; may be empty.
        made: date and time, for the head of the page.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(interval=interval, number=as_number, gain=gain, chance=as_chance)
    by_result = {result: [one for one in findings if one.result is result] for result in Result}
    return environment.get_template(_TEMPLATE).render(
        subject=subject,
        findings=findings,
        gates=gates,
        made=made,
        Result=Result,
        by_result=by_result,
        evidence=lambda one: evidence(one, str(subject.settings.get("effort")), subject.images[0]),
        level=LEVEL,
    )


def interval(value: Interval, unit: str = "") -> str:
    """Format a number and its bounds."""
    if unit == "share":
        return f"{100 * value.value:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"
    return f"{value.value:.3g}{f' {unit}' if unit else ''} ({value.low:.3g} to {value.high:.3g})"


def gain(figure: Figure) -> str:
    """Format a figure's gain with its sign and bounds."""
    scale, unit = (100, " points") if figure.unit == "share" else (1, f" {figure.unit}" if figure.unit else "")
    found = figure.gain
    return f"{scale * found.value:+.3g}{unit} ({scale * found.low:+.3g} to {scale * found.high:+.3g})"
