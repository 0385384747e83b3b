"""Public data sets by name through torchvision: read from disk, or downloaded. Uses torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.source import TORCHVISION, Source, array_source
from experiments.errors import SourceError
from fedcg.learning.data.array_files import ArrayData, LabelledImages
from fedcg.learning.errors import LearningError
from fedcg.learning.networks.torchvision_import import vision
from fedcg.values import Value


class _Known(Value):
    """torchvision's names for the parts of a set, and the files that it expects below ROOT."""

    type_name: str
    files: str
    train: tuple[tuple[str, object], ...] = (("train", True),)
    test: tuple[tuple[str, object], ...] = (("train", False),)


def _emnist(split: str) -> _Known:
    files = f"EMNIST/raw/emnist-{split}-train-images-idx3-ubyte etc."
    common = ("split", split)
    return _Known("EMNIST", files, (common, ("train", True)), (common, ("train", False)))


_KNOWN = {
    **{name: _Known(name, f"{name}/raw/train-images-idx3-ubyte etc.") for name in ("MNIST", "FashionMNIST", "KMNIST")},
    # FedMD-CG does not name its split of EMNIST; accuracies of 97-98 % point to the digits.
    "EMNIST": _emnist("digits"),
    **{f"EMNIST-{split}": _emnist(split) for split in ("digits", "letters", "balanced", "mnist", "bymerge", "byclass")},
    "CIFAR10": _Known("CIFAR10", "cifar-10-batches-py/data_batch_1 etc."),
    "CIFAR100": _Known("CIFAR100", "cifar-100-python/train and test"),
    "SVHN": _Known("SVHN", "train_32x32.mat and test_32x32.mat", (("split", "train"),), (("split", "test"),)),
    "USPS": _Known("USPS", "usps.bz2 and usps.t.bz2"),
}


def named_source(text: str) -> Source:
    """Open `NAME` or `NAME:ROOT`.

    Raises:
        SourceError: unknown name, torchvision is not installed, or neither files nor a network; names the expected
            location.
    """
    name, _, folder = text.partition(":")
    known = _KNOWN.get(name)
    if known is None:
        raise SourceError(f"{TORCHVISION}{name}: choose {', '.join(_KNOWN)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(folder) if folder else cache / "fedcg" / "datasets"
    try:
        kind = getattr(vision("datasets"), known.type_name)
    except LearningError as error:
        raise SourceError(f"{TORCHVISION}{name}: {error}") from error
    parts = {
        part: _part(kind, root, known, dict(words)) for part, words in (("train", known.train), ("test", known.test))
    }
    train, test = (_labelled(name, parts[part]) for part in ("train", "test"))
    classes = getattr(parts["train"], "classes", None)
    return array_source(name, ArrayData(train, test, classes=None if classes is None else tuple(map(str, classes))))


def _part(kind: Callable[..., Any], root: Path, known: _Known, words: dict[str, object]) -> Any:
    """Open existing files; else download them."""
    try:
        return kind(str(root), download=False, **words)
    except (OSError, RuntimeError):
        pass  # raised by torchvision for missing or damaged files
    try:
        root.mkdir(parents=True, exist_ok=True)
        return kind(str(root), download=True, **words)
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{known.type_name} is not in {root} and can't be downloaded ({error}): put {known.files} there, "
            f"or name another folder with {TORCHVISION}NAME:FOLDER"
        ) from error


def _labelled(name: str, part: Any) -> LabelledImages:
    images = np.asarray(part.data)
    if images.ndim == 4 and images.shape[3] != 3:
        images = images.transpose(0, 2, 3, 1)  # SVHN has channels first
    if name.startswith("EMNIST"):
        images = images.transpose(0, 2, 1)  # its files store the columns first
    labels = part.labels if hasattr(part, "labels") else part.targets
    return LabelledImages(np.ascontiguousarray(images), np.asarray(labels).astype(np.int64), Path(name))
