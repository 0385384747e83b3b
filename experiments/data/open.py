"""Opens images by name: folders of image files, the digits in five domains, `.npz`, data sets of torchvision.

Folders may have the layouts of Digit5, Office-Caltech10 and DomainNet. Only torchvision is imported on demand.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from experiments.data.source import (
    DIGITS,
    DIGITS_DOMAINS,
    TORCHVISION,
    FilePicture,
    PicturesPerClass,
    Source,
    by_domain,
    digits,
    file_source,
    read_digits,
    rows_per_class,
    sklearn_file,
)
from experiments.errors import SourceError
from fedcg.errors import NOT_FOUND
from fedcg.imaging import is_named_as_image
from fedcg.learning.data.sources import IMAGE_SUFFIXES, is_array_source


def open_source(text: str) -> Source:
    """Open images by name.

    Args:
        text: `digits`; `digits-domains`; `torchvision:NAME[:ROOT]`; an `.npz`; or a folder with class folders, with
            `train`, `test` and perhaps `val`, or with domains of either form. See docs/how-to/data.md.

    Raises:
        SourceError: the images can't be used; names the file or folder and the expected content.
    """
    if text == DIGITS:
        return digits()
    if text == DIGITS_DOMAINS:
        return digits_domains()
    if text.startswith(TORCHVISION):
        from experiments.data.torchvision_sources import named_source

        return named_source(text.removeprefix(TORCHVISION))
    path = Path(text)
    return file_source(path) if is_array_source(path) else folder_source(path)


_PART_NAMES = {"train": ("train", "train_images"), "test": ("test", "test_images"), "val": ("val", "val_images")}


def folder_source(root: Path) -> Source:
    """Open a folder of images.

    Raises:
        SourceError: no such folder, fewer than two classes, different classes in the parts, or an empty class.
    """
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder", exit_code=None if root.exists() else NOT_FOUND)
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
            raise SourceError(f"{tops['train']} and {top} must hold the same class folders")
        for name in classes:
            if not _files(top / name):
                raise SourceError(f"{top / name} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return _read(root.name, tops, classes)


def _domain_source(root: Path, names: list[str]) -> Source:
    """Domains may lack classes; the result has the classes of all domains."""
    tops = {name: _tops(root / name) for name in names}
    classes = tuple(sorted({one for parts in tops.values() for top in parts.values() for one in _folders(top)}))
    if len(classes) < 2:
        raise SourceError(
            f"{root} holds {len(classes)} class(es) in its domains, at least 2 are needed: {root}/DOMAIN/CLASS/*"
        )
    domains = [_read(name, parts, classes, prefix=f"{name}-") for name, parts in tops.items()]
    for domain in domains:
        if not any(domain.train):
            raise SourceError(f"{root / domain.name} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    source = by_domain(root.name, domains)
    empty = next((name for name, of_class in zip(classes, source.train, strict=True) if not of_class), None)
    if empty is not None:
        raise SourceError(f"{root}: class {empty!r} has no training image in any domain")
    return source


def _read(name: str, tops: dict[str, Path], classes: tuple[str, ...], prefix: str = "") -> Source:
    # A domain's test images may be pooled with training images of all domains, so their names must differ too.
    prefixes = {part: f"{prefix}{part}-" if prefix and part != "train" else prefix for part in tops}
    parts = {part: _pictures(top, classes, prefixes[part]) for part, top in tops.items()}
    return Source(name, classes, parts["train"], parts.get("test"), parts.get("val"))


def _pictures(top: Path, classes: tuple[str, ...], prefix: str) -> PicturesPerClass:
    return tuple(tuple(FilePicture(path, prefix) for path in _files(top / name)) for name in classes)


def _parts(root: Path) -> dict[str, Path]:
    """Return the folders of the parts; empty without both a training and a test part."""
    found = {
        part: root / name for part, names in _PART_NAMES.items() for name in reversed(names) if (root / name).is_dir()
    }
    return found if {"train", "test"} <= found.keys() else {}


def _tops(root: Path) -> dict[str, Path]:
    return _parts(root) or {"train": root}


def _hold_folders(root: Path, folders: list[str]) -> bool:
    """Return whether the folders are domains, which hold folders, or classes, which hold images.

    Raises:
        SourceError: some hold folders and some images.
    """
    deep = [name for name in folders if _folders(root / name)]
    if deep and len(deep) < len(folders):
        other = next(name for name in folders if name not in deep)
        raise SourceError(f"{root / deep[0]} holds folders, but {root / other} does not: use either domains or classes")
    return bool(deep)


def _files(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.iterdir() if is_named_as_image(path, IMAGE_SUFFIXES)))


def _folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


SIDE = 16
_SEED = 5  # assigns scans to domains, and draws patches and angles
_ANGLES = (25.0, 65.0)

Grey = NDArray[np.uint8]


def digits_domains() -> Source:
    """Open five domains of about 359 digits each; without a test part, so a partition halves each domain."""
    scans, labels = read_digits()
    generator = np.random.default_rng(_SEED)
    changes = _changes(generator)
    order = np.concatenate([generator.permutation(np.flatnonzero(labels == label)) for label in range(10)])
    domains = []
    for number, (name, change) in enumerate(changes.items()):
        rows = np.sort(order[number :: len(changes)])
        pixels = np.stack([change(_enlarged(scans[row])) for row in rows])
        pictures = rows_per_class(pixels, labels[rows], 10, f"{DIGITS_DOMAINS}/{name}", stem=f"{name}-")
        domains.append(Source(name, tuple("0123456789"), pictures, None))
    return by_domain(DIGITS_DOMAINS, domains)


def _changes(generator: np.random.Generator) -> dict[str, Callable[[Grey], Grey]]:
    """Return each domain's version of a [SIDE, SIDE] grey digit: [SIDE, SIDE, 3]."""
    photographs = _photographs()

    def blended(digit: Grey) -> Grey:
        photograph = photographs[int(generator.integers(len(photographs)))]
        top, left = (int(generator.integers(size - SIDE + 1)) for size in photograph.shape[:2])
        patch = photograph[top : top + SIDE, left : left + SIDE].astype(np.int16)
        # MNIST-M: the absolute difference of the digit and a patch of a photograph
        return np.abs(patch - digit[..., None].astype(np.int16)).astype(np.uint8)

    def rotated(digit: Grey) -> Grey:
        angle = float(generator.uniform(*_ANGLES)) * (1 if generator.random() < 0.5 else -1)
        return _coloured(np.asarray(Image.fromarray(digit).rotate(angle, Image.Resampling.BILINEAR)))

    return {
        "plain": _coloured,
        "inverted": lambda digit: _coloured(255 - digit),
        "blended": blended,
        "thick": lambda digit: _coloured(np.asarray(Image.fromarray(digit).filter(ImageFilter.MaxFilter(3)))),
        "rotated": rotated,
    }


def _photographs() -> list[Grey]:
    """Return the two photographs at an eighth of their size, so that a patch shows more than one colour."""
    files = [sklearn_file(f"images/{name}.jpg") for name in ("china", "flower")]
    return [np.asarray(Image.open(file).reduce(8)) for file in files]


def _enlarged(digit: Grey) -> Grey:
    return np.asarray(Image.fromarray(digit).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _coloured(digit: Grey) -> Grey:
    return np.repeat(digit[..., None], 3, axis=2)
