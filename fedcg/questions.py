"""Questions to the person at the terminal; where nobody answers, the error names the option that answers instead."""

from __future__ import annotations

import warnings
from getpass import GetPassWarning

import typer

from fedcg.errors import BadInputError


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
