"""Which commands and processes must not load torch, proven in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import typer
from typer.core import TyperGroup

PROBE = """
import sys
from fedcg.cli import app
try:
    app.main(args={arguments!r}, standalone_mode=False)
except SystemExit:
    pass
loaded = [name for name in {forbidden!r} if name in sys.modules]
sys.exit(3 if loaded else 0)
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


def _run(arguments: list[str], forbidden: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    code = PROBE.format(arguments=arguments, forbidden=forbidden)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("path", _all_commands(), ids=lambda path: " ".join(path) or "fedcg")
def test_the_help_of_every_command_is_shown_without_torch(path: tuple[str, ...]) -> None:
    done = _run([*path, "--help"], ("torch",))
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_probe_notices_a_loaded_torch() -> None:
    done = _run(["method", "show", "fedcg"], ("torch",))
    assert done.returncode == 3, done.stdout + done.stderr
