"""The passphrase of a backup, from a file or from the person at the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.questions import secret

MIN_PASSPHRASE = 8
PassphraseFile = Annotated[
    Path | None, typer.Option(help="A file whose first line is the passphrase; without one it is asked for.")
]


def passphrase_of(file: Path | None, *, is_new: bool) -> str:
    """The passphrase in the first line of a file, or typed; a new one is typed twice.

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
