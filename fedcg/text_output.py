"""Text output of commands and the times that they parse: tables with headers, times in UTC, spans such as 30m."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from fedcg.errors import BadInputError

NOTHING = "-"
"""Shown for a missing value."""
_SHOULD = re.compile(r"^[A-Z]\w+ should ")
"""The start of sentences of pydantic and typer: `Input should be`, `String should have`."""
LIST, TABLE, OTHER_FORM = "must be a list", "must be an object with named values", "of another form"
_KINDS = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "string_type": "must be text",
    "path_type": "must be the path of a file or folder, as text",
    "json_invalid": "this is not valid JSON",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    **dict.fromkeys(("list", "tuple", "set", "frozen"), LIST),
    **dict.fromkeys(("dict", "mapping", "model", "dataclass"), TABLE),
}
"""The problem of a value, by the type of pydantic's error or by the first word of that type."""
_PATTERNS = {
    r"^[a-z0-9][a-z0-9-]{0,62}$": "1 to 63 small letters, digits and dashes",
    r"^[a-z][a-z0-9_]{0,62}$": "1 to 63 small letters, digits and underscores",
    r"^[A-Za-z0-9_.:@+-]{1,200}$": "1 to 200 letters, digits and signs of _.:@+-",
    r"^[A-Za-z0-9_.:@]{1,160}$": "1 to 160 letters, digits and signs of _.:@",
    r"^(none|stem|all|all-but:[A-Za-z0-9_.]{1,80})$": "none, stem, all or all-but:STAGE",
    **{rf"^[0-9a-f]{{{count}}}$": f"{count} digits of 0-9 and a-f" for count in (16, 32, 64, 96, 128)},
}
_SPAN = re.compile(r"(\d{1,15})(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> str:
    """Rows below their headers, in columns two spaces apart; `empty` instead of a table without rows."""
    cells = [[NOTHING if value in (None, "") else str(value) for value in row] for row in rows]
    return "\n".join(aligned([list(map(str.upper, columns)), *cells])) if cells else empty


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, in columns two spaces apart; never truncated to the terminal's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def command_line(*words: object, **options: object) -> str:
    """A command of this program as a shell takes it; a list repeats its option."""
    each = ((name, one) for name, some in options.items() for one in (some if isinstance(some, list) else [some]))
    given = (word for name, value in each for word in (f"--{name.replace('_', '-')}", value))
    return shlex.join(map(str, ("fedcg", *words, *given)))


def plain(sentence: str) -> str:
    """A library's message about an invalid value, in the style of this program."""
    return _SHOULD.sub("must ", sentence.removeprefix("Value error, "))


def wrong_value(problem: Mapping[str, Any]) -> str:
    """The problem that pydantic found with a value, in the style of this program, without class names and patterns.

    Args:
        problem: an item of its `errors()`.
    """
    kind = problem["type"]
    if kind == "string_pattern_mismatch":
        pattern = problem["msg"].partition("'")[2].removesuffix("'")
        words = re.fullmatch(r"\^\(([a-z_|]+)\)\$", pattern)
        return f"must be {words[1].replace('|', ' or ') if words else _PATTERNS.get(pattern, OTHER_FORM)}"
    place = re.search(r" at (line \d+ column \d+)$", problem["msg"])
    known = _KINDS.get(kind) or _KINDS.get(kind.partition("_")[0])
    return plain(problem["msg"]) if known is None else f"{known}: {place[1]}" if place else known


def moment(seconds: float) -> str:
    """A unix time in UTC, with its zone."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def seconds_of(text: str, option: str, most: str = "3650d") -> float:
    """The seconds of a span such as 30m.

    Raises:
        BadInputError: the text is not a span, or is longer than `most`.
    """
    if (span := _SPAN.fullmatch(text)) is None:
        raise BadInputError(f"{option} {text}: give a time span such as 90s, 30m, 2h or 3d")
    seconds = int(span[1]) * _SECONDS[span[2]]
    if text != most and seconds > seconds_of(most, option, most):
        raise BadInputError(f"{option} {text}: choose at most {most}")
    return seconds


def moment_of(text: str, now: float, option: str) -> float:
    """The time that an option gives, in unix seconds: a span before `now`, or a date.

    Raises:
        BadInputError: the text is neither.
    """
    if _SPAN.fullmatch(text):
        return now - seconds_of(text, option)
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 reads no Z
    except ValueError as error:
        raise BadInputError(f"{option} {text}: give 10m, 2h, 3d, or a time such as 2026-11-22T08:00") from error
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
