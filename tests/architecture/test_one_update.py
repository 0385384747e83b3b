"""The way of one update that docs/architecture.md shows consists of functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def functions(file: Path) -> set[str]:
    """The names of all functions of a module, methods too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_every_step_of_the_way_of_an_update_is_a_function_of_its_file() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = document.partition("| where | file: function |\n")[2].partition("\n\n")[0]
    steps = re.findall(r"`(\S+\.py): (\w+)`", table)
    assert len(steps) > 20
    assert [step for step in steps if step[1] not in functions(ROOT / step[0])] == []
