"""Folders of image files: class folders, `train` and `test` (and `val`) of such, and domains of either.

The layouts of Digit5 (`DOMAIN/train_images/CLASS`, `DOMAIN/test_images/CLASS`), Office-Caltech10 and DomainNet
(`DOMAIN/CLASS`) are among them.
"""

from __future__ import annotations

from pathlib import Path

from experiments.data.lazy_images import FilePicture, PicturesPerClass
from experiments.data.source import Source, by_domain
from experiments.errors import SourceError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # what an agent reads
_PART_NAMES = {"train": ("train", "train_images"), "test": ("test", "test_images"), "val": ("val", "val_images")}


def folder_source(root: Path) -> Source:
    """Open a folder of images.

    Raises:
        SourceError: no such folder, fewer than two classes, different classes in the parts, or an empty class.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder")
    folders = _folders(root)
    if not _parts(root) and _hold_folders(root, folders):
        return _domain_source(root, folders)
    tops = _tops(root)
    classes = tuple(_folders(tops["train"]))
    if len(classes) < 2:
        top = tops["train"]
        raise SourceError(f"{top} holds {len(classes)} class folder(s), at least 2 are needed: {top}/CLASS/*.png")
    for top in tops.values():
        if _folders(top) != list(classes):
            raise SourceError(f"{tops['train']} and {top} do not hold the same class folders")
        for name in classes:
            if not _files(top / name):
                raise SourceError(f"{top / name} holds no image ({', '.join(SUFFIXES)})")
    return _read(root.name, tops, classes)


def _domain_source(root: Path, names: list[str]) -> Source:
    """Domains may lack classes; the classes are those that any of them has."""
    tops = {name: _tops(root / name) for name in names}
    classes = tuple(sorted({one for parts in tops.values() for top in parts.values() for one in _folders(top)}))
    if len(classes) < 2:
        raise SourceError(
            f"{root} holds {len(classes)} class(es) in its domains, at least 2 are needed: {root}/DOMAIN/CLASS/*"
        )
    domains = [_read(name, parts, classes, prefix=f"{name}-") for name, parts in tops.items()]
    for domain in domains:
        if not any(domain.train):
            raise SourceError(f"{root / domain.name} holds no image ({', '.join(SUFFIXES)})")
    source = by_domain(root.name, domains)
    empty = next((name for name, of_class in zip(classes, source.train, strict=True) if not of_class), None)
    if empty is not None:
        raise SourceError(f"{root}: class {empty!r} has no training image in any domain")
    return source


def _read(name: str, tops: dict[str, Path], classes: tuple[str, ...], prefix: str = "") -> Source:
    # A domain's test images may end among the training images of all domains: their names stay apart too.
    prefixes = {part: f"{prefix}{part}-" if prefix and part != "train" else prefix for part in tops}
    parts = {part: _pictures(top, classes, prefixes[part]) for part, top in tops.items()}
    return Source(name, classes, parts["train"], parts.get("test"), parts.get("val"))


def _pictures(top: Path, classes: tuple[str, ...], prefix: str) -> PicturesPerClass:
    return tuple(tuple(FilePicture(path, prefix) for path in _files(top / name)) for name in classes)


def _parts(root: Path) -> dict[str, Path]:
    """The folders of the parts; none unless there are both a training and a test part."""
    found = {
        part: root / name for part, names in _PART_NAMES.items() for name in reversed(names) if (root / name).is_dir()
    }
    return found if {"train", "test"} <= found.keys() else {}


def _tops(root: Path) -> dict[str, Path]:
    return _parts(root) or {"train": root}


def _hold_folders(root: Path, folders: list[str]) -> bool:
    """Whether the folders are domains, which hold folders, and not classes, which hold images.

    Raises:
        SourceError: some do and some don't.
    """
    deep = [name for name in folders if _folders(root / name)]
    if deep and len(deep) < len(folders):
        other = next(name for name in folders if name not in deep)
        raise SourceError(f"{root / deep[0]} holds folders and {root / other} does not: are they domains or classes?")
    return bool(deep)


def _files(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return tuple(folder / name for name in names if name.lower().endswith(SUFFIXES))


def _folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
