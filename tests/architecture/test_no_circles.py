"""No module imports another that imports it back, at the top, in a function or for types alone."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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
