"""Which of the array forms a path holds, if any."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from fedcg.learning.data.formats.arrays import ArrayData
from fedcg.learning.data.formats.cifar import CIFAR_NAMES, read_cifar_folder
from fedcg.learning.data.formats.idx import is_idx_name, read_idx_folder
from fedcg.learning.data.formats.npz import read_npz
from fedcg.learning.errors import DataError

DATASET_GROUP = "fedcg.datasets"
DATASET_PREFIX = "dataset:"  # before the name of an entry point of the group


def read_arrays(root: Path) -> ArrayData | None:
    """Read an `.npz` file, or a folder with IDX or CIFAR files.

    Returns:
        The data set; None for a folder that holds none of these, whose images are files of their own.

    Raises:
        DataError: a damaged file, or one over the limits; names it.
    """
    if root.suffix == ".npz":
        if not root.is_file():
            raise DataError(f"{root}: no such file")
        return read_npz(root)
    if not root.is_dir():
        return None
    return read_idx_folder(root) or read_cifar_folder(root)


def dataset_name(root: Path) -> str | None:
    """NAME, where a source is `dataset:NAME`; the path before it, which a configuration file's folder adds, is ignored."""
    return root.name.removeprefix(DATASET_PREFIX) if root.name.startswith(DATASET_PREFIX) else None


def installed_dataset(name: str) -> EntryPoint:
    """The entry point of `dataset:NAME`; nothing of it is imported.

    Raises:
        DataError: there is none; names those there are.
    """
    found = {point.name: point for point in entry_points(group=DATASET_GROUP)}
    if name not in found:
        there = ", ".join(sorted(found)) or "none is installed"
        raise DataError(f"{DATASET_PREFIX}{name}: no entry point of that name in the group `{DATASET_GROUP}` ({there})")
    return found[name]


def is_array_source(root: Path) -> bool:
    """Whether `read_arrays` would read this path, by file names alone."""
    if root.suffix == ".npz":
        return True
    return root.is_dir() and any(
        path.is_file() and (is_idx_name(path.name) or path.name in CIFAR_NAMES) for path in root.iterdir()
    )


def stamp(root: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of the files that `read_arrays` may read: as long as they stay, so does the data."""
    files = (
        [root] if root.is_file() else sorted(path for path in root.iterdir() if path.is_file()) if root.is_dir() else []
    )
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
