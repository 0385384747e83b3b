"""What modules import: no circles, and no torch in the help of any command."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

ROOT = Path(__file__).parents[2]


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by their dotted names."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Those of the known modules that some code names in an import."""
    named = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names}
            named |= inside if inside <= known.keys() else {node.module} | (inside & known.keys())
    return named & known.keys()


@pytest.mark.parametrize("package", ["audit", "devices", "edge_client", "experiments", "export", "fedcg", "recording"])
def test_a_packages_modules_import_each_other_in_no_circle(package: str) -> None:
    known = modules(package)
    imports = {name: imported(ast.parse(file.read_text()), known) - {name} for name, file in known.items()}
    TopologicalSorter(imports).prepare()  # raises a CycleError with the circle's modules


def test_a_circle_through_a_function_is_found() -> None:
    known = {"one": ROOT, "two": ROOT}
    assert imported(ast.parse("def later():\n    from two import thing"), known) == {"two"}
    assert imported(ast.parse("import one\nimport elsewhere"), known) == {"one"}


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
