"""Questions to the person at the terminal, a passphrase among them; where nobody answers, the error names the option that answers instead."""

from __future__ import annotations

import warnings
from getpass import GetPassWarning
from pathlib import Path
from typing import Annotated

import typer

from fedcg.errors import NOT_FOUND, BadInputError

MIN_PASSPHRASE = 8
PassphraseFile = Annotated[
    Path | None, typer.Option(help="A file whose first line is the passphrase; without one it is asked for.")
]


class NotAnsweredError(BadInputError):
    """Nobody answered a question, or not with yes; nothing was changed."""

    def __init__(self, problem: str, option: str) -> None:
        super().__init__(f"{problem}: give {option} where nobody can answer")
        self.next_step = f"run it again with {option}"


def confirm(question: str) -> None:
    """Return once a person has answered with yes.

    Raises:
        NotAnsweredError: another answer, or no terminal.
    """
    try:
        if typer.confirm(question, err=True):
            return
    except typer.Abort:
        typer.echo(err=True)
    raise NotAnsweredError("this was not confirmed, and nothing was changed", "--yes")


def secret(name: str, option: str, *, is_new: bool = False) -> str:
    """What a person types unseen; twice where it is new.

    Args:
        name: what is asked for.
        option: what gives it without a terminal.
        is_new: ask a second time.

    Raises:
        NotAnsweredError: there is no terminal.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GetPassWarning)  # what is typed would be shown
            return str(typer.prompt(name, hide_input=True, confirmation_prompt=is_new, err=True))
    except (GetPassWarning, typer.Abort) as error:
        raise NotAnsweredError(f"there is no terminal to ask for the {name.lower()}", option) from error


def passphrase_of(file: Path | None, *, is_new: bool) -> str:
    """The passphrase of a backup, in the first line of a file, or typed; a new one is typed twice.

    Raises:
        BadInputError: the file can't be read, a new passphrase is too short, or there is no terminal to ask at.
    """
    if file is None:
        passphrase = secret("Passphrase", "--passphrase-file FILE", is_new=is_new)
    else:
        try:
            passphrase = file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else None
            raise BadInputError(f"--passphrase-file {file} can't be read: {error}", exit_code=code) from error
    if is_new and len(passphrase) < MIN_PASSPHRASE:
        raise BadInputError(f"the passphrase has {len(passphrase)} characters; at least {MIN_PASSPHRASE} are needed")
    return passphrase
