"""How values are written on the page: times, spans, sizes and shares. None is written as "unavailable"."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from jinja2 import Environment
from markupsafe import Markup, escape

UNAVAILABLE = Markup('<span class="none">unavailable</span>')
_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def span(seconds: float | None) -> str | Markup:
    """A span of time in its largest unit, e.g. "3 min"."""
    if seconds is None:
        return UNAVAILABLE
    for size, unit in _UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: float | None) -> str | Markup:
    """A time on the coordinator's clock; the page's script writes it in the reader's zone."""
    if at is None:
        return UNAVAILABLE
    stamp = datetime.fromtimestamp(at, timezone.utc)
    text = stamp.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" data-at="{}">{}</time>').format(stamp.isoformat(), f"{at:.0f}", text)


def ago(at: float | None) -> str | Markup:
    """How long ago a time was; the page's script keeps it current."""
    if at is None:
        return UNAVAILABLE
    text = f"{span(max(0.0, time.time() - at))} ago"
    return Markup('<time data-ago="{}" title="{}">{}</time>').format(f"{at:.0f}", _clock(at), text)


def until(at: float | None) -> str | Markup:
    """A countdown to a time; the page's script runs it."""
    if at is None:
        return UNAVAILABLE
    left = at - time.time()
    text = f"in {span(left)}" if left >= 1 else "now"
    return Markup('<time data-until="{}" title="{}">{}</time>').format(f"{at:.0f}", _clock(at), text)


def share(value: float | None, digits: int = 1) -> str | Markup:
    """A share of one in percent."""
    return UNAVAILABLE if value is None else f"{100.0 * value:.{digits}f} %"


def points(value: float | None) -> str | Markup:
    """A difference of two shares, in points, with its sign."""
    return UNAVAILABLE if value is None else f"{100.0 * value:+.1f}".replace("-", "\N{MINUS SIGN}")


def size(value: float | None) -> str | Markup:
    """A number of bytes."""
    if value is None:
        return UNAVAILABLE
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def count(value: float | None) -> str | Markup:
    """A number with its thousands apart."""
    return UNAVAILABLE if value is None else f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def words(value: object) -> str:
    """A name of the code as words: `not_eligible` is "not eligible"."""
    return str(value).replace("_", " ")


def known(value: object) -> object:
    """The value, or "unavailable"."""
    return UNAVAILABLE if value is None or value == "" else value


def coded(value: str) -> Markup:
    """A sentence whose commands stand between backticks."""
    pieces = value.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )


def add_formats(environment: Environment) -> None:
    """Make all of these filters of the templates."""
    for function in (span, moment, ago, until, share, points, size, count, words, known, coded):
        environment.filters[function.__name__] = function


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
