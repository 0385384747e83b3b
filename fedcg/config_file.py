"""Reads configuration files in TOML and reports every problem at once, each with its line and a hint. Torch-free."""

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from fedcg.errors import NOT_FOUND, FedcgError
from fedcg.text_output import LIST, TABLE, wrong_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ModelT = TypeVar("ModelT", bound=BaseModel)
Place = tuple[str, ...]
Change = Callable[[dict[str, Any]], tuple[Mapping[Place, str], list[str]]]
_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.-]+)\s*\]")
_KEY = re.compile(r"^\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
_OF_A_UNION = re.compile(r"[\[(]|^(constrained|function)-")
"""Steps that pydantic adds to the location of a problem if a value may have several types."""


def _exact(schema: Any) -> Any:
    if isinstance(schema, dict):
        strict = {"strict": True} if schema.get("type") in ("int", "float", "bool") else {}
        return {name: _exact(value) for name, value in schema.items()} | strict
    return [_exact(value) for value in schema] if isinstance(schema, list) else schema


class Settings(BaseModel, frozen=True, extra="forbid"):
    """Base of all settings: a number may not be text or `true`, and a switch takes only `true` or `false`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's own schema, but strict for numbers and booleans. Paths and tuples are not strict: files hold them in other types."""
        schema: CoreSchema = _exact(handler(source))
        return schema


def listed(source: str, problems: Iterable[str]) -> str:
    """A headline with the number of problems, and below it one problem per line."""
    lines = [f"\n  {problem}" for problem in problems]
    return f"{source}: {len(lines)} problem{'s' if len(lines) != 1 else ''}{''.join(lines)}"


def read_values(path: Path, failure: type[FedcgError], text: str | None = None) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file (`text` if it is read already), and its values.

    Raises:
        Exception: a `failure`.
    """
    try:
        text = path.read_text(encoding="utf-8") if text is None else text
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise failure(listed(str(path), [f"this is not valid TOML: {error}"])) from error
    except FileNotFoundError as error:
        raise failure(listed(str(path), ["can't be read: no such file"]), exit_code=NOT_FOUND) from error
    except (OSError, UnicodeDecodeError) as error:
        raise failure(listed(str(path), [f"can't be read: {error}"])) from error


def read_toml(
    path: Path,
    model: type[ModelT],
    failure: type[FedcgError],
    change: Change = lambda _: ({}, []),
    text: str | None = None,
) -> ModelT:
    """Read a file into its schema.

    Args:
        path: the file.
        model: its schema.
        failure: the error that is raised.
        change: replaces values; returns the origins of the new values and the problems with them.
        text: the file's content if it is read already; `path` then only names it.

    Raises:
        Exception: a `failure` that lists every problem with its line and a hint.
    """
    text, values = read_values(path, failure, text)
    origins, problems = change(values)
    try:
        read = model.model_validate(values)
    except ValidationError as error:
        raise failure(listed(str(path), [*problems, *problems_of(model, error, text, origins)])) from error
    if problems:
        raise failure(listed(str(path), problems))
    return read


def problems_of(
    model: type[BaseModel], error: ValidationError, text: str = "", origins: Mapping[Place, str] | None = None
) -> list[str]:
    """The problems that pydantic found, in words.

    Args:
        model: the schema that was asked for.
        error: from pydantic.
        text: the file, for line numbers; without it none are named.
        origins: the sources of settings that are not in the file.
    """
    places = {place: f"line {number}: " for place, number in _key_lines(text).items()}
    places |= {place: f"{origin}: " for place, origin in (origins or {}).items()}
    places[()] = "line 1: " if text else ""
    return list(dict.fromkeys(_problem(model, detail, places) for detail in error.errors(include_url=False)))


def numbered(text: str, problems: Iterable[str]) -> list[str]:
    """Problems that begin with the name of a setting, prefixed with its line in a file, or with the line of its table."""
    lines = {".".join(place): f"line {number}: " for place, number in _key_lines(text).items()}
    named = [(re.split(": | = ", problem)[0], problem) for problem in problems]
    return [lines.get(name, lines.get(name.rpartition(".")[0], "")) + problem for name, problem in named]


def problems_in_words(error: ValidationError, model: type[BaseModel] = BaseModel) -> str:
    """The problems that pydantic found with values that are not from a file, on one line."""
    return "; ".join(line.removeprefix("(file): ") for line in problems_of(model, error))


def set_values(text: str, values: Mapping[tuple[str, str], str | bool | float | list[str]]) -> str:
    """A TOML text of plain `[table]` sections with some values replaced, and the rest unchanged.

    Args:
        text: the file.
        values: by table and key; the table is "" for keys before the first one.
    """
    lines = text.splitlines()
    for (table, key), value in values.items():
        lines = _set(lines, table, key, f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _set(lines: list[str], table: str, key: str, line: str) -> list[str]:
    header = f"[{table}]"
    if table and header not in lines:
        return [*lines, "", header, line]
    start = lines.index(header) + 1 if table else 0
    end = next((index for index in range(start, len(lines)) if lines[index].startswith("[")), len(lines))
    for index in range(start, end):
        if lines[index].split("=")[0].strip() == key:
            return [*lines[:index], line, *lines[index + 1 :]]
    return [*lines[:start], line, *lines[start:]]


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The closest known name, or all of them."""
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


def _problem(model: type[BaseModel], detail: Any, places: Mapping[Place, str]) -> str:
    message = wrong_value(detail)
    steps = [str(step) for step in detail["loc"]]
    while steps and _OF_A_UNION.search(steps[-1]):
        del steps[-1]
    location, section = tuple(step for step in steps if not _OF_A_UNION.search(step)), section_of(model, steps[:-1])
    first = message.partition(" ")[0]  # a problem with several settings begins with the name of one
    if first in section.model_fields and (not location or message.startswith(f"{first} = ")):
        location = (*location[:-1], first)
    where = next(places[location[:n]] for n in range(len(location), -1, -1) if location[:n] in places)
    *tables, name = location or ("(file)",)
    described = name
    if name.isdecimal() and tables:  # an item of a list
        section, described = section_of(model, steps[:-2]), tables[-1]
    fields = section.model_fields
    about = (_bounds(section, described), fields[described].description) if described in fields else ()
    hint = "; ".join(filter(None, about))
    if detail["type"] == "extra_forbidden":
        message, hint = "there is no such setting", nearest(name, tuple(fields))
    elif detail["type"] == "missing":
        hint = hint or f"add `{name}`" + (f" to [{tables[0]}]" if tables else "")
    elif message == LIST:
        example = [detail["input"][:40]] if isinstance(detail["input"], str) else ["…"]
        message += f": {name} = {json.dumps(example, ensure_ascii=False)}"
    elif message == TABLE:
        message = f"must be a table: [{'.'.join((*tables, name))}]"
    return f"{where}{'.'.join((*tables, name))}: {message}" + (f" ({hint})" if hint else "")


def _bounds(model: type[BaseModel], name: str) -> str:
    """The range of a number; empty unless it has both a minimum and a maximum."""
    for kind in _kinds(model, name):
        least = kind.get("minimum", kind.get("exclusiveMinimum"))
        if least is not None and "maximum" in kind:
            return f"{'' if 'minimum' in kind else 'above '}{least:.15g} to {kind['maximum']:.15g}"
    return ""


@cache
def _kinds(model: type[BaseModel], name: str) -> tuple[dict[str, Any], ...]:
    field = model.model_json_schema().get("properties", {}).get(name, {})
    return (field, *field.get("anyOf", ()))


def from_text(model: type[BaseModel], name: str, text: str) -> object:
    """The value that a text means in a field: a comma-separated list, a number, true or false; otherwise the text itself."""
    kinds = {kind.get("type") for kind in _kinds(model, name)}
    if "array" in kinds:
        return [word.strip() for word in text.split(",") if word.strip()]
    try:
        return json.loads(text) if kinds & {"integer", "number", "boolean"} else text
    except ValueError:
        return text


def plain_value(text: str) -> object:
    """The number, true or false that a text means, None for an empty text, otherwise the text itself."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return text
    is_plain = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) or not text
    return value if is_plain else text


def section_of(model: type[BaseModel], location: Iterable[str]) -> type[BaseModel]:
    """The model of the table at `location`. For an item of a list, which has none, the last model on the way.

    If a table may have one of several models, the step `[NAME]` after it names the model; without that step it is the first.
    """
    kinds: list[type[BaseModel]] = []
    for step in location:
        if field := model.model_fields.get(step):
            kinds = _models(field.annotation)
            model = next(iter(kinds), model)
        else:
            model = next((kind for kind in kinds if step == f"[{kind.__name__}]"), model)
    return model


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
