"""What commands print for people, and the times that they read: tables with headers, moments in UTC, spans such as 30m."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from fedcg.errors import BadInputError

NOTHING = "-"
"""What stands for a value that there is not."""
_SHOULD = re.compile(r"^[A-Z]\w+ should ")
"""How pydantic's sentences begin, typer's with them: `Input should be`, `String should have`."""
_SENTENCES = {
    "Field required": "is missing",
    "Extra inputs are not permitted": "there is no such field",
    "Unable to parse input string as an integer, exceeded maximum size": "must be a valid integer",
    "Input should be a valid boolean": "must be true or false",
}
_SPAN = re.compile(r"(\d{1,15})(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> str:
    """Rows below their headers, in columns that are two spaces apart; `empty` in place of a table without rows."""
    cells = [[NOTHING if value in (None, "") else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (list(map(str.upper, columns)), *cells)
    ]
    return "\n".join(lines) if cells else empty


def plain(sentence: str) -> str:
    """What a library wrote of a wrong value, in the words of this program."""
    return _SENTENCES.get(sentence) or _SHOULD.sub("must ", sentence)


def moment(seconds: float) -> str:
    """A unix time in UTC, with its zone."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def seconds_of(text: str, option: str, most: str = "3650d") -> float:
    """The seconds of a span such as 30m.

    Raises:
        BadInputError: the option names none, or a longer one than `most`.
    """
    if (span := _SPAN.fullmatch(text)) is None:
        raise BadInputError(f"{option} {text}: give a time span such as 90s, 30m, 2h or 3d")
    seconds = int(span[1]) * _SECONDS[span[2]]
    if text != most and seconds > seconds_of(most, option, most):
        raise BadInputError(f"{option} {text}: choose at most {most}")
    return seconds


def moment_of(text: str, now: float, option: str) -> float:
    """The time that an option names, in unix seconds: so long before `now`, or a date.

    Raises:
        BadInputError: it names none.
    """
    if _SPAN.fullmatch(text):
        return now - seconds_of(text, option)
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 reads no Z
    except ValueError as error:
        raise BadInputError(f"{option} {text}: give 10m, 2h, 3d, or a time such as 2026-11-22T08:00") from error
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
