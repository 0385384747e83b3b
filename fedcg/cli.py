"""The command `fedcg`: mounts the sub-commands that packages register in the entry-point group `fedcg.commands`.

Sub-commands are imported only when they are shown or called; none may import torch at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import click
import typer
import typer.main
from rich.console import Console

DEBUG_FLAG = "--debug"


def _as_command(loaded: typer.Typer | Callable[..., Any], name: str) -> click.Command:
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    single = typer.Typer(add_completion=False)
    single.command(name)(loaded)
    return typer.main.get_command(single)


class LazyGroup(click.Group):
    """A group whose sub-commands are entry points, loaded on demand."""

    def _entry(self, name: str) -> EntryPoint | None:
        return next((entry for entry in entry_points(group="fedcg.commands") if entry.name == name), None)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all registered sub-commands whose package is installed."""
        return sorted(entry.name for entry in entry_points(group="fedcg.commands"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one sub-command."""
        entry = self._entry(cmd_name)
        if entry is None:
            return None
        try:
            return _as_command(entry.load(), cmd_name)
        except ModuleNotFoundError as error:
            return _unavailable(cmd_name, error)


def _unavailable(name: str, error: ModuleNotFoundError) -> click.Command:
    def explain() -> None:
        raise click.ClickException(
            f"`fedcg {name}` needs the Python package {error.name!r}, which is not installed here. "
            "Install the extra for this kind of machine, e.g. pip install 'fedcg-edge[edge]' (or infer, coordinator, demo)."
        )

    return click.Command(name, callback=explain, help=f"(not installed here: {error.name})")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("fedcg-edge"), prog_name="fedcg")
def app() -> None:
    """FedCG Edge: federated learning that shares a classifier and a generator, never an image or an extractor.

    Exit codes: 0 done; 1 failed; 2 bad usage or bad input; 130 interrupted. Errors go to stderr; --debug shows tracebacks.
    """


def main() -> None:
    """Entry point of the console script."""
    debug = DEBUG_FLAG in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG_FLAG]
    try:
        code = app.main(args=arguments, standalone_mode=False, prog_name="fedcg")
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the outermost boundary: one line for the operator, a traceback with --debug
        if debug:
            raise
        Console(stderr=True, highlight=False).print(f"Error: {error}", markup=False)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
