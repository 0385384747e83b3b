"""What the coordinator's commands share: options, opening a home, telling results, explaining errors. Heavy imports happen inside."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.errors import CoordinatorError, StoreError

if TYPE_CHECKING:
    from coordinator.paths import Home
    from coordinator.storage.store import Store

Directory = Annotated[Path, typer.Option("--dir", help="The coordinator's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
FAILED, BAD_INPUT = 1, 2


@contextmanager
def explained() -> Iterator[None]:
    """Turn our errors into one line on stderr and an exit code: 1 failed while running, 2 bad input."""
    from fedcg.wire.errors import WireError

    try:
        yield
    except (CoordinatorError, WireError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201 - the commands' output
        raise typer.Exit(FAILED if isinstance(error, StoreError) else BAD_INPUT) from error


@contextmanager
def store_of(directory: Path) -> Iterator[tuple[Home, Store]]:
    """The home at `directory` and its open database.

    Raises:
        HomeError: there is no coordinator in it.
        StoreError: the database is of another version.
    """
    from coordinator.paths import Home
    from coordinator.storage.store import Store

    home = Home(directory).require()
    store = Store(home.database)
    try:
        yield home, store
    finally:
        store.close()


def tell(values: object, text: str, *, as_json: bool) -> None:
    """Print a result, for scripts or for people."""
    print(json.dumps(values) if as_json else text)  # noqa: T201 - the commands' output


def sayer(*, as_json: bool) -> Callable[[str], None]:
    """What prints the lines of a server at once, for scripts or for people."""

    def say(line: str) -> None:
        print(json.dumps({"message": line}) if as_json else line, flush=True)  # noqa: T201 - the commands' output

    return say
