"""Output and prompts of commands: results as text or, with `--json`, as one envelope per line on stdout.

Without a terminal, a prompt ends with an error that names the option to use instead.

`{"ok": true, "data": …}` is a result, `{"ok": false, "error": {"type", "message", "next"}}` a failure. A failure with partial results
also has `data`. A long-running command (`run`, `serve`) prints one envelope per line. The exit codes are in `fedcg.errors`.

A command is a function that returns its result, as values for scripts and as text for people: `prints` adds `--json` and prints one
of them.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from getpass import GetPassWarning
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fedcg.errors import FAILED, NEXT_STEPS, NOT_FOUND, BadInputError, FedcgError, in_words

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Result = tuple[object, str] | tuple[object, str, int | FedcgError]
"""What a command prints: the values with `--json`, otherwise the text. Optionally the exit code, or the error that ends the command."""


def prints(command: Callable[..., Result]) -> Callable[..., None]:
    """Turn a function into a command that prints its result."""

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


def command(app: typer.Typer, name: str | None = None, **options: Any) -> Callable[[Callable[..., Result]], Any]:
    """Add a function to `app` as a command that prints its result."""
    return lambda function: app.command(name, **options)(prints(function))


def with_options(
    run: Callable[..., Any], command: Callable[..., Any], **added: tuple[Any, object]
) -> Callable[..., Any]:
    """`run` with name, docstring and options of `command`, without a `Client`, and with added options and their defaults; typer reads the signature."""
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
    """Print the result of a command and flush stdout."""
    _print({"ok": True, "data": data})


def line_printer(*, as_json: bool) -> Callable[[str], None]:
    """A function that prints each line of a server immediately, for scripts or for people."""
    return lambda line: print_data({"message": line}) if as_json else typer.echo(line)  # both flush


def print_error(kind: str, message: str, next_step: str, data: object = None) -> None:
    """Print why a command failed, what to do, and any results that it found."""
    found = {} if data is None else {"data": data}
    _print({"ok": False, "error": {"type": kind, "message": message, "next": next_step}, **found})


def print_failure(error: Exception) -> None:
    """Print the error that ended a command."""
    code = error.exit_code if isinstance(error, FedcgError) else FAILED
    own, data = (error.next_step, error.data) if isinstance(error, FedcgError) else ("", None)
    print_error(type(error).__name__.removesuffix("Error"), in_words(error), own or NEXT_STEPS[code], data)


def _print(envelope: object) -> None:
    text = json.dumps(envelope, ensure_ascii=False)  # letters stay readable; control characters are escaped
    sys.stdout.write("".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text) + "\n")
    sys.stdout.flush()


MIN_PASSPHRASE = 8
PassphraseFile = Annotated[Path | None, typer.Option(help="File whose first line is the passphrase. Default: ask.")]


class NotAnsweredError(BadInputError):
    """A question was not answered with yes; nothing was changed."""

    def __init__(self, problem: str, option: str) -> None:
        super().__init__(f"{problem}: give {option} to run without a prompt")
        self.next_step = f"run it again with {option}"


def confirm(question: str) -> None:
    """Ask, and return if the answer is yes.

    Raises:
        NotAnsweredError: another answer, or no terminal.
    """
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort:
        typer.echo(err=True)
    raise NotAnsweredError("this was not confirmed, and nothing was changed", "--yes")


def ask_secret(name: str, option: str, *, is_new: bool = False) -> str:
    """Ask for a secret without echo, twice if it is new.

    Args:
        name: of the secret.
        option: that gives it without a terminal.
        is_new: ask a second time.

    Raises:
        NotAnsweredError: there is no terminal.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GetPassWarning)  # the input would be visible
            return str(typer.prompt(name, hide_input=True, confirmation_prompt=is_new, err=True))
    except (GetPassWarning, typer.Abort) as error:
        raise NotAnsweredError(f"there is no terminal to ask for the {name.lower()}", option) from error


def passphrase_of(file: Path | None, *, is_new: bool) -> str:
    """The passphrase of a backup, from the first line of a file or from the terminal; a new one is asked for twice.

    Raises:
        BadInputError: the file can't be read, a new passphrase is too short, or there is no terminal to ask at.
    """
    if file is None:
        passphrase = ask_secret("Passphrase", "--passphrase-file FILE", is_new=is_new)
    else:
        try:
            passphrase = file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else None
            raise BadInputError(f"--passphrase-file {file} can't be read: {error}", exit_code=code) from error
    if is_new and len(passphrase) < MIN_PASSPHRASE:
        raise BadInputError(f"the passphrase has {len(passphrase)} characters; at least {MIN_PASSPHRASE} are needed")
    return passphrase
