"""The results of commands: text for people, and with `--json` one envelope, one object per line, on stdout.

`{"ok": true, "data": …}` for a result, `{"ok": false, "error": {"type", "message", "next"}}` where the command failed, with `data` beside it
where it found something all the same. A command
that goes on (`run`, `serve`) prints one envelope for each line. The exit codes are in `fedcg.errors`.

A command is a function that returns its result, as values for scripts and as text for people: `prints` adds `--json` and prints one
of them.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from fedcg.errors import FAILED, NEXT_STEPS, FedcgError, in_words

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Result = tuple[object, str] | tuple[object, str, int | FedcgError]
"""What a command prints: values with `--json`, else the text; and the exit code, where it is not 0, or the error with which it ends all the same."""


def prints(command: Callable[..., Result]) -> Callable[..., None]:
    """A command that prints what its function returns."""

    def run(*, as_json: bool, **given: Any) -> None:
        values, text, end = (*command(**given), 0)[:3]
        if text and not as_json:
            typer.echo(text)
        if isinstance(end, FedcgError):
            end.data = values
            raise end
        if as_json:
            print_data(values)
        if end:
            raise typer.Exit(end)

    return with_options(run, command, as_json=(AsJson, False))


def with_options(
    run: Callable[..., Any], command: Callable[..., Any], **added: tuple[Any, object]
) -> Callable[..., Any]:
    """`run` with name, docstring and options of `command`, but for a `Client`, and some more, each with its default; typer reads the signature."""
    hints = get_type_hints(command, localns={"Client": object}, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        known.replace(kind=keyword, annotation=hints[name])
        for name, known in inspect.signature(command).parameters.items()
        if hints[name] is not object
    ]
    for name, (annotation, default) in added.items():
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {known.name: known.annotation for known in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def print_data(data: object) -> None:
    """Print the result of a command; it is on its way when this returns."""
    _print({"ok": True, "data": data})


def print_error(kind: str, message: str, next_step: str, data: object = None) -> None:
    """Print why a command failed, what to do, and what it found all the same."""
    found = {} if data is None else {"data": data}
    _print({"ok": False, "error": {"type": kind, "message": message, "next": next_step}, **found})


def print_failure(error: Exception) -> None:
    """Print the error with which a command ended."""
    code = error.exit_code if isinstance(error, FedcgError) else FAILED
    own, data = (error.next_step, error.data) if isinstance(error, FedcgError) else ("", None)
    print_error(type(error).__name__.removesuffix("Error"), in_words(error), own or NEXT_STEPS[code], data)


def _print(envelope: object) -> None:
    text = json.dumps(envelope, ensure_ascii=False)  # letters stay readable; signs that steer a terminal do not
    sys.stdout.write("".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text) + "\n")
    sys.stdout.flush()
