"""What is wrong with a file that a person wrote in TOML: every problem at once, with its line, in words, and a hint. Torch-free."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ModelT = TypeVar("ModelT", bound=BaseModel)
Place = tuple[str, ...]
_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.-]+)\s*\]")
_KEY = re.compile(r"^\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
_WORDS = {"extra_forbidden": "there is no such setting", "missing": "is missing"}
_PATTERNS = {
    r"^[a-z0-9][a-z0-9-]{0,62}$": "1 to 63 small letters, digits and dashes",
    r"^[a-z][a-z0-9_]{0,62}$": "1 to 63 small letters, digits and underscores",
}


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong with a configuration.

    Attributes:
        key: dotted name of the setting, e.g. `broker.port`.
        where: `line N` of the file, or the environment variable.
    """

    key: str
    where: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.key}: {self.message}{hint}"


Change = Callable[[dict[str, Any]], tuple[Mapping[Place, str], list[ConfigProblem]]]


class TomlError(ValueError):
    """A file that can't be used; `problems` holds all of it at once."""

    def __init__(self, source: str, problems: tuple[ConfigProblem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(listed(source, problems))


def listed(source: str, problems: Iterable[ConfigProblem]) -> str:
    """Every problem of a file, one per line below their number."""
    lines = [f"\n  {problem}" for problem in problems]
    return f"{source}: {len(lines)} problem{'s' if len(lines) != 1 else ''}{''.join(lines)}"


def read_toml(path: Path, model: type[ModelT], change: Change = lambda _: ({}, [])) -> ModelT:
    """Read a file into its schema.

    Args:
        path: the file.
        model: its schema.
        change: replaces values, and returns where the new ones come from and what is wrong with them.

    Raises:
        TomlError: lists every problem with its line and a hint.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        where = f"line {found.group(1) if found else 1}"
        raise TomlError(str(path), (ConfigProblem("(syntax)", where, str(error), "this is not valid TOML"),)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TomlError(str(path), (ConfigProblem("(file)", "line 0", f"can't be read: {error}"),)) from error
    origins, problems = change(values)
    try:
        read = model.model_validate(values)
    except ValidationError as error:
        raise TomlError(str(path), (*problems, *problems_of(model, error, text, origins))) from error
    if problems:
        raise TomlError(str(path), tuple(problems))
    return read


def problems_of(
    model: type[BaseModel], error: ValidationError, text: str = "", origins: Mapping[Place, str] | None = None
) -> list[ConfigProblem]:
    """The problems that pydantic found, in words.

    Args:
        model: the schema that was asked for.
        error: what pydantic found.
        text: the file, for line numbers; without it none are named.
        origins: where settings come from that are not in the file.
    """
    places = {place: f"line {number}" for place, number in _key_lines(text).items()}
    places |= {(): "line 1" if text else "", **(origins or {})}
    return [_problem(model, detail, places) for detail in error.errors(include_url=False)]


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The known name that was probably meant, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"


def _key_lines(text: str) -> dict[Place, int]:
    lines: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = tuple(header.group(1).split("."))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, key.group(1)), number)
    return lines


def _problem(model: type[BaseModel], detail: Any, places: Mapping[Place, str]) -> ConfigProblem:
    location = tuple(str(step) for step in detail["loc"])
    where = next(places[location[:n]] for n in range(len(location), -1, -1) if location[:n] in places)
    pattern = _PATTERNS.get(detail.get("ctx", {}).get("pattern", ""))
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = f"must be {pattern}" if pattern else _WORDS.get(detail["type"], message)
    return ConfigProblem(".".join(location) or "(file)", where, message, _hint(model, detail, location))


def _hint(model: type[BaseModel], detail: Any, location: Place) -> str:
    fields = _section(model, location[:-1]).model_fields
    if detail["type"] == "extra_forbidden":
        return nearest(location[-1], tuple(fields))
    described = fields[location[-1]].description if location and location[-1] in fields else None
    if described is None and detail["type"] == "missing":
        return f"add `{location[-1]}`" + (f" to [{location[0]}]" if len(location) > 1 else "")
    return described or ""


def _section(model: type[BaseModel], location: Place) -> type[BaseModel]:
    """The model of the table at `location`; the last one on the way where there is none (an item of a list)."""
    for step in location:
        field = model.model_fields.get(step)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model
