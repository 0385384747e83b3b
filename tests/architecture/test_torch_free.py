"""Which commands and processes must not load torch, proven in processes of their own."""

import subprocess
import sys
from importlib.metadata import entry_points

import typer
from typer.core import TyperGroup

PROBE = """
import contextlib, io, sys
from fedcg.cli import app
for arguments in {commands!r}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        app.main(args=arguments, standalone_mode=False)
    loaded = [name for name in {forbidden!r} if name in sys.modules]
    if loaded or not shown.getvalue():
        sys.exit(f"{{arguments}} loads {{loaded}} and prints {{len(shown.getvalue())}} characters")
"""


def _paths(command: object, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = [prefix]
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            found += _paths(child, (*prefix, name))
    return found


def _all_commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for entry in sorted(entry_points(group="fedcg.commands"), key=lambda entry: entry.name):
        loaded = entry.load()
        command = typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else None
        found += _paths(command, (entry.name,))
    return found


def _run(commands: list[list[str]], forbidden: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run commands, one after the other in one process, until one of them has loaded what is forbidden."""
    code = PROBE.format(commands=commands, forbidden=forbidden)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_help_of_every_command_is_shown_without_torch() -> None:
    commands = [[*path, "--help"] for path in _all_commands()]
    assert len(commands) > 60
    done = _run([*commands, ["method", "show", "fedcg"]], ("torch",))  # the last one is the first that loads torch
    assert done.returncode == 1
    assert "['method', 'show', 'fedcg'] loads ['torch']" in done.stderr
