"""Writes each client of a deal its own folder: `train/CLASS/*` and `test/CLASS/*`, and `val/CLASS/*` where it has such images.

Also one `common` test set. An agent sees an ordinary data source. Knows nothing of training.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from experiments.data.deal import Deal, DealOptions, deal_out
from experiments.data.source import Picture, PicturesPerClass, RowPicture, Source
from experiments.errors import SourceError

PARTITION_FILE = "partition.json"


def _place(pictures: Sequence[Picture], folder: Path, name: str | None = None) -> None:
    """Hard-link image files into a folder, or copy them where the file system can't link; write what is no file.

    A name other than its own is for a single picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        target = folder / (name or picture.name)
        try:
            if isinstance(picture, RowPicture):
                target.write_bytes(picture.content())
            else:
                os.link(picture.path, target)
        except FileExistsError:
            continue
        except OSError as error:
            if isinstance(picture, RowPicture):
                raise SourceError(f"{target} can't be written: {error.strerror or error}") from error
            shutil.copyfile(picture.path, target)


def prepare(source: Source, out: Path, options: DealOptions) -> Deal:
    """Write `out/CLIENT/{train,test}/CLASS/*`, `out/common/CLASS/*`, `out/public/*` and `out/partition.json`.

    Every client gets every class folder, also an empty one, so that class lists agree. Without a test part in the
    source, a sixth of each class becomes test and another sixth (at most 200, the same in every class) common test.
    The file names of public images do not show their classes. `partition.json` has the numbers of each client's images.

    Args:
        source: the images.
        out: folder to write to; made if it is not there.
        options: what decides who gets what.

    Raises:
        SourceError: too few images for so many clients, or a folder that can't be written.
    """
    deal = deal_out(source, options)
    counts = {}
    for name, dealt in deal.clients.items():
        parts = {"train": dealt.train, "val": dealt.val, "test": dealt.test}
        for part, pictures in parts.items():
            for label, of_class in enumerate(pictures or ()):
                _place(of_class, out / name / part / deal.classes[label])
        counts[name] = {"train_images": _count(dealt.train), "test_images": _count(dealt.test)}
    for label, of_class in enumerate(deal.common):
        _place(of_class, out / "common" / deal.classes[label])
    for number, picture in enumerate(deal.public):
        _place([picture], out / "public", f"{number:06d}{Path(picture.name).suffix}")
    (out / PARTITION_FILE).write_text(json.dumps(counts, indent=1))
    return deal


def _count(pictures: PicturesPerClass) -> int:
    return sum(map(len, pictures))


def image_counts(out: Path) -> dict[str, dict[str, int]]:
    """By client the numbers of its images that `prepare` wrote: `train_images`, `test_images`.

    Raises:
        SourceError: nothing (complete) was written there.
    """
    try:
        counts: dict[str, dict[str, int]] = json.loads((out / PARTITION_FILE).read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"{out / PARTITION_FILE} is no partition record: {error}") from error
    return counts
