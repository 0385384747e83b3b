"""The report as ONE self-contained HTML page: its style, pictures and drawings are inside, and it loads nothing.

Curves as inline SVG: no script, no fonts of their own; colours come from the page's style, so they follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from audit.measures.figures import Curve, Figure, Interval
from audit.report.findings import Finding, Result, Subject, Verdict, as_number

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 40
_LEAST_LOG = 1e-3  # the least value of a logarithmic axis
_TICKS = 5


def svg(curve: Curve) -> Markup:
    """A drawing of a curve's lines, with axes, ticks and their numbers; a legend stands beside it in the page."""
    xs = [_at(x, log=curve.log_x) for points in curve.lines.values() for x, _ in points]
    ys = [y for points in curve.lines.values() for _, y in points]
    if not xs:
        return Markup("")
    frame = _Frame(min(xs), max(xs), min(0.0, min(ys)), max(ys), curve.log_x)
    pieces = [*_axes(frame, curve)]
    for number, points in enumerate(curve.lines.values()):
        line = " ".join(f"{frame.x(_at(x, log=curve.log_x)):.1f},{frame.y(y):.1f}" for x, y in points)
        pieces.append(Markup('<polyline class="line l{}" points="{}"/>').format(number % 6, line))
    title = Markup("<title>{}</title>").format(curve.title)
    head = Markup('<svg viewBox="0 0 {} {}" role="img">').format(_WIDTH, _HEIGHT)
    return head + title + Markup("").join(pieces) + Markup("</svg>")


class _Frame:
    """From values to places; an axis without extent gets one."""

    def __init__(self, left: float, right: float, low: float, high: float, log_x: bool) -> None:
        self.left, self.right = left, right if right > left else left + 1
        self.low, self.high = low, high if high > low else low + 1
        self.log_x = log_x

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)


def _at(x: float, *, log: bool) -> float:
    return math.log10(max(x, _LEAST_LOG)) if log else x


def _axes(frame: _Frame, curve: Curve) -> Iterator[Markup]:
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        x, y = frame.left + share * (frame.right - frame.left), frame.low + share * (frame.high - frame.low)
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            _LEFT, _WIDTH - _RIGHT, frame.y(y), frame.y(y)
        )
        yield _text(_LEFT - 6, frame.y(y) + 4, f"{y:.3g}", "end")
        yield _text(frame.x(x), _HEIGHT - _BOTTOM + 16, f"{10**x if frame.log_x else x:.3g}", "middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, curve.x, "middle")
    yield Markup('<text class="tick" transform="rotate(-90)" x="{}" y="12" text-anchor="middle">{}</text>').format(
        -(_TOP + _HEIGHT - _BOTTOM) / 2, curve.y
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


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
