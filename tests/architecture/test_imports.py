"""What modules import: no circles, and no torch in the help of any command; and that what is named is there."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fedcg.cli import app
from tests.support.commands import commands_of

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


@pytest.mark.parametrize(
    "package", ["audit", "devices", "edge_client", "coordinator", "experiments", "export", "fedcg"]
)
def test_a_packages_modules_import_each_other_in_no_circle(package: str) -> None:
    known = modules(package)
    imports = {name: imported(ast.parse(file.read_text()), known) - {name} for name, file in known.items()}
    TopologicalSorter(imports).prepare()  # raises a CycleError with the circle's modules


RUN_ALL = """
import contextlib, io, sys
from fedcg.cli import app
for arguments in {commands!r}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        app.main(args=arguments, standalone_mode=False)
    if "torch" in sys.modules or not shown.getvalue():
        sys.exit(f"{{arguments}} loads torch: {{'torch' in sys.modules}}, prints {{len(shown.getvalue())}} characters")
"""


def test_the_profile_of_a_box_and_the_help_of_every_command_are_shown_without_torch() -> None:
    names = {name[:length] for name, _ in commands_of(app) for length in range(len(name) + 1)}
    commands = [[*(word for word in name if word != "IMAGE..."), "--help"] for name in sorted(names)]
    assert len(commands) > 60
    every = [
        ["doctor", "--hardware"],
        ["method", "list"],
        *commands,
        ["method", "show", "fedcg"],
    ]  # the last one is the first that loads torch
    code = RUN_ALL.format(commands=every)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "['method', 'show', 'fedcg'] loads torch: True" in done.stderr


def test_every_test_module_that_the_documentation_names_is_there() -> None:
    known = {file.name for file in (ROOT / "tests").rglob("test_*.py")} | {"test_client.py"}  # of `fedcg new`
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    named = {(name, text.name) for text in texts for name in re.findall(r"test_\w+\.py", text.read_text("utf-8"))}
    assert len(named) > 20
    assert [pair for pair in sorted(named) if pair[0] not in known] == []
