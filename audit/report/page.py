"""The report as ONE self-contained HTML page: its style, pictures and drawings are inside, and it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from audit.measures.figures import Figure, Interval
from audit.report.charts import svg
from audit.report.findings import Finding, Result, Subject, as_number
from audit.report.gate import Verdict

_TEMPLATE = "report.html"


def render(subject: Subject, findings: Sequence[Finding], gates: Sequence[Verdict], made: str) -> str:
    """The page.

    Args:
        subject: what was audited.
        findings: per attack, in the order of the report.
        gates: verdicts; empty without gates.
        made: when, for its foot.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": svg, "interval": interval, "number": as_number, "gain": gain}
    by_result = {result: [one for one in findings if one.result is result] for result in Result}
    return environment.get_template(_TEMPLATE).render(
        subject=subject, findings=findings, gates=gates, made=made, Result=Result, by_result=by_result
    )


def interval(value: Interval, unit: str = "") -> str:
    """A number and its bounds."""
    if unit == "share":
        return f"{100 * value.value:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"
    return f"{value.value:.3g}{f' {unit}' if unit else ''} ({value.low:.3g} to {value.high:.3g})"


def gain(figure: Figure) -> str:
    """A figure's gain with its sign and bounds."""
    scale, unit = (100, " points") if figure.unit == "share" else (1, f" {figure.unit}" if figure.unit else "")
    found = figure.gain
    return f"{scale * found.value:+.3g}{unit} ({scale * found.low:+.3g} to {scale * found.high:+.3g})"
