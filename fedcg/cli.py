"""The command `fedcg`: mounts the sub-commands that packages register in the entry-point group `fedcg.commands`.

Sub-commands are imported only when they are shown or called; none may import torch at import. Built on typer alone: a machine with
only the `infer` extra has no click.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fedcg.errors import BAD_INPUT, FAILED, NEXT_STEPS, NOT_FOUND, BadInputError, FedcgError, in_words, users_trace
from fedcg.event_log import log_text
from fedcg.terminal import print_error, print_failure
from fedcg.text_output import plain

DEBUG_FLAG = "--debug"
JSON_FLAG = "--json"
HELP_FLAGS = {"-h", "--help"}
INTERRUPTED = 130
PANELS = {
    "For the operator": ("coordinator", "broker", "federation", "device", "token", "deploy"),
    "On a device": ("enrol", "agent", "cohort", "doctor"),
    "Models": ("infer", "model", "export"),
    "Research": ("demo", "simulate", "tables", "audit", "bench", "method", "network"),
}
# What to install for packages that only one option or sub-command needs.
_INSTALLS = {
    "ray": "'fedcg-edge[ray]'",
    "cryptography": "cryptography",
    "onnx": "onnx",
    "onnxruntime": "'fedcg-edge[infer]', with a GPU 'fedcg-edge[infer-gpu]', on a Jetson NVIDIA's build (docs/tutorials/jetson.md)",
    "infer uvicorn": "'fedcg-edge[serve]'",
    "infer fastapi": "'fedcg-edge[serve]'",
}


class MissingExtraError(FedcgError):
    """A command that needs a Python package which is not installed on this machine."""

    exit_code = BAD_INPUT

    def __init__(self, command: str, missing: ModuleNotFoundError) -> None:
        name = (missing.name or "").partition(".")[0]
        known = _INSTALLS.get(name) or _INSTALLS.get(f"{command} {name}")
        extra = "Install the extra for this kind of machine, e.g. pip install 'fedcg-edge[edge]' (or infer, coordinator, demo)."
        super().__init__(
            f"`fedcg {command}` needs the Python package {name!r}, which is not installed here. "
            f"{f'Install it with: pip install {known}.' if known else extra}"
        )


def _as_command(loaded: typer.Typer | Callable[..., Any], name: str) -> TyperCommand | TyperGroup:
    app = loaded
    if not isinstance(app, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(loaded)
    command = typer.main.get_command(app)
    assert isinstance(command, (TyperCommand, TyperGroup))
    command.name = name
    return command


class _OptionsTable(Table):
    """typer's table of options, with all names of an option in one column that is never cut. Long text in other columns wraps."""

    def add_row(self, *cells: Any, **style: Any) -> None:
        """Add a row in typer's form: optionally an asterisk, four columns of names, the type and the help."""
        if len(cells) >= 6:
            *required, long, short, off, short_off, kind, text = cells
            pairs = (Text(", ").join(name for name in pair if name.plain) for pair in ((long, short), (off, short_off)))
            cells = (*required, Text("\n").join(pair for pair in pairs if pair.plain), kind, text)
        super().add_row(*cells, **style)
        for column in self.columns:
            column.overflow = "fold"
        self.columns[-min(3, len(self.columns))].no_wrap = True


class _Fedcg(TyperGroup):
    """The root command. It loads sub-commands from entry points on demand and turns every error into a line on stderr and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all registered sub-commands, in the order of the panels."""
        ordered = [name for names in PANELS.values() for name in names]
        found = sorted(entry.name for entry in entry_points(group="fedcg.commands"))
        return sorted(found, key=lambda name: ordered.index(name) if name in ordered else -1)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The named command; a mistyped one is refused with the closest names."""
        self.commands.update(dict.fromkeys(self.list_commands(ctx), self))  # only the names are looked at
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        """Load one sub-command."""
        entry = next((one for one in entry_points(group="fedcg.commands") if one.name == cmd_name), None)
        if entry is None:
            return None
        try:
            command = _as_command(entry.load(), cmd_name)
        except ModuleNotFoundError as error:
            return _unavailable(cmd_name, error)
        # Completion is installed for `fedcg` as a whole.
        command.params = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
        command.rich_help_panel = next((panel for panel, names in PANELS.items() if cmd_name in names), None)
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the named command; usage errors of the library are reworded."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(message := getattr(error, "message", None), str):
                vars(error)["message"] = plain(message)
            raise

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *more: Any, **options: Any) -> Any:
        """Run, and end the process."""
        given = sys.argv[1:] if args is None else args
        words = [word for word in given if word != DEBUG_FLAG]
        as_json = JSON_FLAG in words
        if not HELP_FLAGS.isdisjoint(words):
            from typer import rich_utils

            vars(rich_utils)["Table"] = _OptionsTable
        try:
            return super().main(words, prog_name, *more, **options)
        except SystemExit as stop:
            if stop.code == INTERRUPTED:
                Console(stderr=True).print("Interrupted.")
            usage = stop.__context__  # what typer printed on stderr before it ended the process
            if as_json and usage is not None and hasattr(usage, "format_message"):
                print_error("Usage", usage.format_message(), NEXT_STEPS[BAD_INPUT])
            raise
        except Exception as error:  # the outermost boundary: one line for the user, a traceback with --debug
            shown = _for_people(error, words)
            if DEBUG_FLAG in given:
                raise shown from error
            if as_json:
                print_failure(shown)
            is_ours = type(error).__module__.startswith(("fedcg.", "experiments."))  # they run the user's code
            if is_ours and not as_json and (trace := users_trace(error.__cause__)):
                Console(stderr=True, highlight=False).print(trace, markup=False, soft_wrap=True)
            text = "\n".join(log_text(line, len(line)) for line in in_words(shown).split("\n"))
            Console(stderr=True, highlight=False).print(f"Error: {text}", markup=False, soft_wrap=True)
            sys.exit(shown.exit_code if isinstance(shown, FedcgError) else FAILED)


def _for_people(error: Exception, words: Sequence[str]) -> Exception:
    """The error to show: one of a library becomes one whose message names what to do."""
    if isinstance(error, ModuleNotFoundError):
        return MissingExtraError(words[0], error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return BadInputError(f"{error.filename}: no such file or folder", exit_code=NOT_FOUND)
    cause = error.__cause__
    if isinstance(error, FedcgError) and error.exit_code == BAD_INPUT and isinstance(cause, FileNotFoundError):
        name = str(cause.filename or str(cause).rpartition(": ")[2])  # safetensors gives no file name
        if any(name.startswith(word) and not Path(word).exists() for word in words):
            error.exit_code = NOT_FOUND  # but not for a file that is missing in an existing folder
    if "pydantic" in sys.modules:
        from pydantic import ValidationError

        from fedcg.config_file import problems_in_words

        if isinstance(error, ValidationError):
            return BadInputError(problems_in_words(error))
    return error


def _unavailable(name: str, error: ModuleNotFoundError) -> TyperCommand | TyperGroup:
    def explain() -> None:
        raise MissingExtraError(name, error) from error

    app = typer.Typer(add_completion=False)
    whatever_follows = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=f"(not installed here: {error.name})", context_settings=whatever_follows)(explain)
    return _as_command(app, name)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fedcg, version {version('fedcg-edge')}")
        raise typer.Exit


def _describe(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """FedCG Edge: federated learning on edge devices. Training data stays on the devices. The method decides which networks leave them.

    Exit codes: 0 done; 1 failed; 2 bad usage or bad input; 3 no answer in time; 4 not connected or not allowed; 5 already running;
    6 already exists; 7 not found; 8 an audit found a leak, a gate is not met, or records differ; 130 interrupted.
    FEDCG_HOME sets --dir of a coordinator, FEDCG_CONFIG sets --config of a device.
    Errors go to stderr; --debug shows tracebacks. With --json, stdout has one envelope: {"ok": true, "data": …} or {"ok": false, "error": …}.
    """


fedcg = typer.Typer(
    cls=_Fedcg, callback=_describe, no_args_is_help=True, context_settings={"help_option_names": sorted(HELP_FLAGS)}
)
app = _as_command(fedcg, "fedcg")


def main() -> None:
    """Entry point of the console script."""
    try:
        app.main(prog_name="fedcg")
    finally:
        gc.freeze()  # skip the final search for reference cycles, which takes up to a third of a second
