"""Writes each client of a deal its own folder: `train/CLASS/*` and `test/CLASS/*`, and `val/CLASS/*` where it has such images.

Also one `common` test set. An agent sees an ordinary data source. Knows nothing of training.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.data.deal import DealOptions, deal_out
from experiments.data.source import Picture, Source
from experiments.errors import SourceError

PARTITION_FILE = "partition.json"


@dataclass(frozen=True)
class ClientFolder:
    """One client's data: its folder and the number of images per class, in label order."""

    id: str
    root: Path
    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """What `prepare` wrote: a folder per client, one common test set, and the classes.

    `common_per_class` is the number of the rarest class there; without domains every class has as many.
    """

    classes: tuple[str, ...]
    clients: tuple[ClientFolder, ...]
    common: Path
    common_per_class: int


def _place(pictures: Sequence[Picture], folder: Path, name: str | None = None) -> None:
    """Hard-link image files into a folder, or copy them where the file system can't link; write what is no file.

    A name other than its own is for a single picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        target = folder / (name or picture.name)
        try:
            if picture.file is None:
                target.write_bytes(picture.content())
            else:
                os.link(picture.file, target)
        except FileExistsError:
            continue
        except OSError as error:
            if picture.file is None:
                raise SourceError(f"{target} can't be written: {error.strerror or error}") from error
            shutil.copyfile(picture.file, target)


def prepare(source: Source, out: Path, options: DealOptions) -> Prepared:
    """Write `out/CLIENT/{train,test}/CLASS/*`, `out/common/CLASS/*`, `out/public/*` and `out/partition.json`.

    Every client gets every class folder, also an empty one, so that class lists agree. Without a test part in the
    source, a sixth of each class becomes test and another sixth (at most 200, the same in every class) common test.
    The file names of public images do not show their classes.

    Args:
        source: the images.
        out: folder to write to; made if it is not there.
        options: what decides who gets what.

    Raises:
        SourceError: too few images for so many clients, or a folder that can't be written.
    """
    deal = deal_out(source, options)
    folders = []
    for name, dealt in deal.clients.items():
        parts = {"train": dealt.train, "val": dealt.val, "test": dealt.test}
        for part, pictures in parts.items():
            for label, of_class in enumerate(pictures or ()):
                _place(of_class, out / name / part / deal.classes[label])
        folders.append(ClientFolder(name, out / name, tuple(map(len, dealt.train)), tuple(map(len, dealt.test))))
    for label, of_class in enumerate(deal.common):
        _place(of_class, out / "common" / deal.classes[label])
    for number, picture in enumerate(deal.public):
        _place([picture], out / "public", f"{number:06d}{Path(picture.name).suffix}")
    prepared = Prepared(deal.classes, tuple(folders), out / "common", min(map(len, deal.common)))
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
