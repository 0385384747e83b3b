"""What the coordinator's commands share: options, opening a home, printing results. Heavy imports happen inside.

A command is a function that returns its result, as values for scripts and as text for people: `prints` adds `--json` and prints one
of them; `asks` also adds the options that name a coordinator, and gives the function a client of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fedcg.json_output import print_data

if TYPE_CHECKING:
    from coordinator.paths import Home
    from coordinator.storage.store import Store

HOME_VARIABLE = "FEDCG_HOME"
Directory = Annotated[Path, typer.Option("--dir", envvar=HOME_VARIABLE, help="The coordinator's directory.")]
Somewhere = Annotated[
    Path | None, typer.Option("--dir", envvar=HOME_VARIABLE, help="The coordinator's directory, on its machine.")
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Or the address of its HTTP interface, with an API token in FEDCG_API_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Named = Annotated[str | None, typer.Argument(help="Its id; not needed where one federation is live.")]
Reason = Annotated[str, typer.Option("--reason", help="For the record, e.g. maintenance.")]
Result = tuple[object, str]
"""What a command prints: values with `--json`, else the text."""


def asks(command: Callable[..., Result]) -> Callable[..., None]:
    """A command whose function takes a client of the coordinator that `--dir` or `--url` names, before its own options."""

    def ask(*, directory: Path | None, url: str | None, **given: Any) -> Result:
        from coordinator.cli.client import client_of

        with client_of(directory, url) as client:
            return command(client, **given)

    return prints(_with_options(ask, command, directory=(Somewhere, None), url=(Url, None)))


def prints(command: Callable[..., Result]) -> Callable[..., None]:
    """A command that prints what its function returns."""

    def run(*, as_json: bool, **given: Any) -> None:
        values, text = command(**given)
        print_result(values, text, as_json=as_json)

    return _with_options(run, command, as_json=(AsJson, False))


def _with_options(
    run: Callable[..., Any], command: Callable[..., Any], **added: tuple[Any, object]
) -> Callable[..., Any]:
    """`run` with name, docstring and options of `command`, and some more, each with its default; typer reads the signature."""
    hints = get_type_hints(command, localns={"Client": object}, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        known.replace(kind=keyword, annotation=hints[name])
        for name, known in inspect.signature(command).parameters.items()
        if name != "client"
    ]
    for name, (annotation, default) in added.items():
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {known.name: known.annotation for known in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


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
    store = Store.of(home)
    try:
        yield home, store
    finally:
        store.close()


def print_result(values: object, text: str, *, as_json: bool) -> None:
    """Print a result, for scripts or for people."""
    if as_json:
        print_data(values)
    else:
        print(text)  # noqa: T201 - the commands' output


def line_printer(*, as_json: bool) -> Callable[[str], None]:
    """A function that prints each line of a server at once, for scripts or for people."""

    def print_line(line: str) -> None:
        if as_json:
            print_data({"message": line})
        else:
            print(line, flush=True)  # noqa: T201 - the commands' output

    return print_line
