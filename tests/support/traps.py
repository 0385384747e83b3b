"""A folder to start programs in whose modules have the names of what they import, and leave a mark when one is imported."""

from pathlib import Path

MARK = "imported"
_NAMES = ("json", "multiprocessing", "threading", "typing", "numpy", "torch", "pydantic", "coordinator", "edge_client")


def lay_traps(folder: Path) -> Path:
    """Fill a folder with such modules, a package `fedcg` among them."""
    trap = f"open({str(folder / MARK)!r}, 'a').write(__name__ + ' ')\nraise SystemExit(f'{{__name__}} of the current folder')\n"
    (folder / "fedcg").mkdir()
    for file in ("fedcg/__init__.py", *(f"{name}.py" for name in _NAMES)):
        (folder / file).write_text(trap)
    return folder


def imported_in(folder: Path) -> str:
    """The modules of a folder of traps that were imported."""
    mark = folder / MARK
    return mark.read_text() if mark.exists() else ""
