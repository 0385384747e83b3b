"""Shared by the coordinator's commands: options, and opening a home. Heavy imports happen inside.

`asks` adds a command with `--json` (as `prints` does) and the options that name a coordinator. It passes a client of that
coordinator to the function.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcg.terminal import Result, prints, with_options

if TYPE_CHECKING:
    from coordinator.paths import Home
    from coordinator.storage.store import Store

_NEXT, _COMMAND = (
    re.compile(r"(?m)^(Next|To .*): .*$"),
    re.compile(r"fedcg (federation|device|token|coordinator token) [a-z]+"),
)
HOME_VARIABLE = "FEDCG_HOME"
Directory = Annotated[Path, typer.Option("--dir", envvar=HOME_VARIABLE, help="The coordinator's directory.")]
Somewhere = Annotated[
    Path | None, typer.Option("--dir", envvar=HOME_VARIABLE, help="The coordinator's directory on this machine.")
]
Url = Annotated[
    str | None, typer.Option("--url", help="Instead of --dir: the coordinator's URL; needs a token in FEDCG_API_TOKEN.")
]
Named = Annotated[str | None, typer.Argument(help="Federation id. Default: see `fedcg federation list --help`.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason for the event log, e.g. maintenance.")]


def asks(app: typer.Typer, name: str) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Add a command whose function takes, before its own options, a client of the coordinator that `--dir` or `--url` names."""

    def add(command: Callable[..., Result]) -> Callable[..., None]:
        def ask(*, directory: Path | None, url: str | None, **given: Any) -> Result:
            from coordinator.cli.client import client_of

            with client_of(directory, url) as client:
                result = command(client, **given)
            text, place = result[1], f" --url {url}" if url else f" --dir {shlex.quote(str(directory))}"
            if url or os.environ.get(HOME_VARIABLE) != str(directory):  # the suggestion names the same coordinator
                text = _NEXT.sub(lambda line: _COMMAND.sub(lambda named: named[0] + place, line[0]), text)
            return (result[0], text) if len(result) == 2 else (result[0], text, result[2])

        return app.command(name)(prints(with_options(ask, command, directory=(Somewhere, None), url=(Url, None))))

    return add


@contextmanager
def store_of(directory: Path) -> Iterator[tuple[Home, Store]]:
    """The home at `directory` and its open database.

    Raises:
        HomeError: there is no coordinator in it.
        StoreError: the database has another version, or can't be written.
    """
    from coordinator.paths import Home
    from coordinator.storage.database import explained
    from coordinator.storage.store import Store

    home = Home(directory).require()
    with explained(home), closing(Store.of(home)) as store:
        yield home, store
