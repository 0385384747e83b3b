"""A working folder with modules that shadow the imports of a program, and leave a mark when imported."""

from pathlib import Path

MARK = "imported"
_NAMES = ("json", "multiprocessing", "threading", "typing", "numpy", "torch", "pydantic", "coordinator", "edge_client")


def lay_traps(folder: Path) -> Path:
    """Fill a folder with such modules, including a package `fedcg`."""
    trap = f"open({str(folder / MARK)!r}, 'a').write(__name__ + ' ')\nraise SystemExit(f'{{__name__}} of the current folder')\n"
    (folder / "fedcg").mkdir()
    for file in ("fedcg/__init__.py", *(f"{name}.py" for name in _NAMES)):
        (folder / file).write_text(trap)
    return folder


def imported_in(folder: Path) -> str:
    """Return the imported modules of a folder of traps."""
    mark = folder / MARK
    return mark.read_text() if mark.exists() else ""
