"""Curves as inline SVG: no script, no fonts of their own; colours come from the page's style, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

from audit.measures.figures import Curve

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
