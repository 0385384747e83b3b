"""A user's package, installed in a folder on the import path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.learning import registry


def register(folder: Path, package: str, group: str, name: str, target: str) -> None:
    """Write metadata of an installed package with one entry point."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the folder on the import path, for this process and its children; modules imported from it are removed at the end."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    registry.registered.cache_clear()
    yield folder
    registry.registered.cache_clear()
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
