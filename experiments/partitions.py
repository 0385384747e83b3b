"""Splits a data set among clients and writes each client its own folder: `train/CLASS/*` and `test/CLASS/*`.

Also holds out one balanced `common` test set. A client's train and test images follow the same class proportions.
Everything is a function of the seed; the order of execution never changes it. Knows nothing of training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experiments.errors import SourceError
from experiments.sources import FilesPerClass, Source

MIN_TRAIN_IMAGES = 40  # two batches of 16 after a validation split, and something to learn from
MAX_REDRAWS = 1000
COMMON_PER_CLASS = 200  # a sampling error of about one point with ten classes
PARTITION_FILE = "partition.json"

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Partition:
    """How classes are spread over clients: `iid`, or Dirichlet with concentration `omega` (ω; smaller is more skewed)."""

    kind: Literal["iid", "dirichlet"]
    omega: float = 0.0

    @staticmethod
    def parse(text: str) -> Partition:
        """Read `iid` or `dirichlet:OMEGA`.

        Raises:
            SourceError: anything else.
        """
        kind, _, value = text.partition(":")
        if text == "iid":
            return Partition("iid")
        try:
            omega = float(value)
        except ValueError:
            omega = -1.0
        if kind != "dirichlet" or not 0 < omega < float("inf"):
            raise SourceError(f"partition {text!r} is neither `iid` nor `dirichlet:OMEGA` with a positive number")
        return Partition("dirichlet", omega)

    def shares(self, clients: int, classes: int, generator: np.random.Generator) -> Shares:
        """Which share of each class each client gets: [clients, classes] float64, every column sums to 1."""
        if self.kind == "iid":
            return np.full((clients, classes), 1.0 / clients)
        return generator.dirichlet(np.full(clients, self.omega), size=classes).T


@dataclass(frozen=True)
class ClientFolder:
    """One client's data: its folder and the number of images per class, in label order."""

    id: str
    root: Path
    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """What `prepare` wrote: a folder per client, one balanced common test set, and the classes."""

    classes: tuple[str, ...]
    clients: tuple[ClientFolder, ...]
    common: Path
    common_per_class: int


def client_names(clients: int) -> tuple[str, ...]:
    """Ids `client-1` …, zero-padded so that they sort by number."""
    width = len(str(clients))
    return tuple(f"client-{number:0{width}d}" for number in range(1, clients + 1))


def cut(count: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Cut `count` things by shares that sum to 1: whole numbers that sum to `count`, each within 1 of its share."""
    edges = np.rint(np.cumsum(shares) * count).astype(np.int64)
    edges[-1] = count
    pieces: NDArray[np.int64] = np.diff(edges, prepend=0)
    return pieces


def limit(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Reduce class counts to a total of at most `most`, keeping their proportions (largest remainders)."""
    total = int(counts.sum())
    if total <= most:
        return counts
    exact = counts * (most / total)
    kept: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    largest = np.argsort(kept - exact, kind="stable")[: most - int(kept.sum())]
    kept[largest] += 1
    return kept


def _draw_shares(
    partition: Partition, clients: int, pool: NDArray[np.int64], least: int, generator: np.random.Generator
) -> Shares:
    for _ in range(MAX_REDRAWS):
        shares = partition.shares(clients, len(pool), generator)
        if (shares @ pool).min() >= least:
            return shares
    raise SourceError(
        f"{int(pool.sum())} training images can't be split over {clients} clients with at least {least} each: "
        "use fewer clients, more images or a larger omega"
    )


def _hold_out(source: Source, generator: np.random.Generator) -> tuple[FilesPerClass, FilesPerClass, FilesPerClass]:
    """Shuffle, and give (train, test, common) files per class; common has the same number in every class."""

    def shuffled(files: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(files[index] for index in generator.permutation(len(files)))

    train = tuple(map(shuffled, source.train))
    if source.test is not None:
        test = tuple(map(shuffled, source.test))
        common = min(COMMON_PER_CLASS, max(1, min(map(len, test)) // 5))
    else:
        common = min(COMMON_PER_CLASS, max(1, min(map(len, train)) // 6))
        test = tuple(files[: common + max(1, len(files) // 6)] for files in train)
        train = tuple(files[len(held) :] for files, held in zip(train, test, strict=True))
    return train, tuple(files[common:] for files in test), tuple(files[:common] for files in test)


def _place(files: Sequence[Path], folder: Path) -> None:
    """Hard-link files into a folder, or copy them where the file system can't link."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        target = folder / path.name
        try:
            os.link(path, target)
        except FileExistsError:
            continue
        except OSError:
            shutil.copyfile(path, target)


def _hand_out(pool: FilesPerClass, shares: Shares, most: int | None) -> list[list[tuple[Path, ...]]]:
    """Files per client and class; disjoint, in the proportions of `shares`, at most `most` per client."""
    counts = np.stack([cut(len(files), shares[:, label]) for label, files in enumerate(pool)], axis=1)
    starts = np.cumsum(counts, axis=0) - counts
    kept = np.stack([row if most is None else limit(row, most) for row in counts])
    return [
        [files[starts[client, label] :][: kept[client, label]] for label, files in enumerate(pool)]
        for client in range(len(shares))
    ]


def prepare(
    source: Source, out: Path, *, clients: int, partition: Partition, seed: int, images_per_client: int | None = None
) -> Prepared:
    """Write `out/CLIENT/{train,test}/CLASS/*`, `out/common/CLASS/*` and `out/partition.json`.

    Every client gets every class folder, also an empty one, so that class lists agree. Without a test part in the
    source, a sixth of each class becomes test and another sixth (at most 200, the same in every class) common test.

    Args:
        source: the images.
        out: folder to write to; made if it is not there.
        clients: number of clients.
        partition: how classes are spread over clients.
        seed: decides everything.
        images_per_client: at most this many training images per client, class proportions kept; None: no bound.

    Raises:
        SourceError: too few images for so many clients.
    """
    generator = np.random.default_rng(seed)
    train, test, common = _hold_out(source, generator)
    least = MIN_TRAIN_IMAGES if images_per_client is None else min(MIN_TRAIN_IMAGES, images_per_client)
    pool = np.array([len(files) for files in train], dtype=np.int64)
    shares = _draw_shares(partition, clients, pool, least, generator)
    train_files = _hand_out(train, shares, images_per_client)
    test_files = _hand_out(test, shares, None)
    folders = []
    for number, name in enumerate(client_names(clients)):
        for part, files in (("train", train_files[number]), ("test", test_files[number])):
            for label, of_class in enumerate(files):
                _place(of_class, out / name / part / source.classes[label])
        counts = [tuple(map(len, files)) for files in (train_files[number], test_files[number])]
        folders.append(ClientFolder(name, out / name, counts[0], counts[1]))
    for label, of_class in enumerate(common):
        _place(of_class, out / "common" / source.classes[label])
    prepared = Prepared(source.classes, tuple(folders), out / "common", len(common[0]))
    (out / PARTITION_FILE).write_text(json.dumps(_record(prepared), indent=1))
    return prepared


def _record(prepared: Prepared) -> dict[str, object]:
    return {
        "format": 1,
        "classes": prepared.classes,
        "common_per_class": prepared.common_per_class,
        "clients": [{"id": client.id, "train": client.train, "test": client.test} for client in prepared.clients],
    }


def load_prepared(out: Path) -> Prepared:
    """Read back what `prepare` wrote.

    Raises:
        SourceError: nothing (complete) was written there.
    """
    try:
        record = json.loads((out / PARTITION_FILE).read_text())
        clients = tuple(
            ClientFolder(entry["id"], out / entry["id"], tuple(entry["train"]), tuple(entry["test"]))
            for entry in record["clients"]
        )
        return Prepared(tuple(record["classes"]), clients, out / "common", int(record["common_per_class"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{out / PARTITION_FILE} is no partition record: {error}") from error
