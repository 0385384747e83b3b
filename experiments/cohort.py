"""The images of every client of a simulation, in memory: the same deal and the same split as the demo writes. Uses torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from experiments.dealing import ClientPictures, DealOptions, Partition, TestDeal, Validation, deal_out
from experiments.errors import SourceError
from experiments.pictures import Picture, PicturesPerClass
from experiments.sources import Source
from fedcg.learning.data import FileEntry, ImageSet, decode_image, split_by_hash
from fedcg.learning.errors import DataError
from fedcg.learning.simulation import ClientData
from fedcg.learning.spec import ImageForm

# As the agent splits a folder that has a test part.
SPLIT = {"train": 0.9, "val": 0.1}


@dataclass(frozen=True)
class Skipped:
    """An image that could not be decoded, and why; nobody has it."""

    file: str
    reason: str


@dataclass(frozen=True)
class Cohort:
    """Everybody's images.

    Attributes:
        clients: by id, in id order.
        common: one test set for all.
        public: [N, C, H, W] uint8 without labels for the server, or None.
        classes: class names in label order.
        skipped: images that were left out, in the order in which they were met.
        domains: client id to the name of its domain; empty unless the partition is by domain.
    """

    clients: Mapping[str, ClientData]
    common: ImageSet
    public: torch.Tensor | None
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    domains: Mapping[str, str] | None = None


def build_cohort(
    source: Source,
    form: ImageForm,
    partition: Partition,
    clients: int,
    seed: int,
    images_per_client: int | None = None,
    validation: Validation = "share",
    test: TestDeal = "proportional",
    public_images: int = 0,
) -> Cohort:
    """Deal a source out and decode what was dealt.

    Args:
        source: the images.
        form: the spec's image form.
        partition: how images are spread over clients.
        clients: number of clients.
        seed: decides who gets what.
        images_per_client: see `DealOptions`, as are `validation`, `test` and `public_images`.
        validation: `share` or `test-half`.
        test: `proportional` or `even`.
        public_images: unlabelled images for the server, at most.

    Raises:
        SourceError: too few images for so many clients; a client without enough that can be decoded; no such domains.
    """
    deal = deal_out(source, DealOptions(clients, partition, seed, images_per_client, validation, test, public_images))
    reader = _Reader(form, deal.classes)
    datasets = {name: _client_data(name, pictures, reader) for name, pictures in deal.clients.items()}
    common = reader.read(deal.common).images
    public = None
    if deal.public:
        public = reader.unlabelled(deal.public)
    domains = {name: one.domain for name, one in deal.clients.items() if one.domain is not None}
    return Cohort(datasets, common, public, deal.classes, tuple(reader.skipped), domains)


def _client_data(name: str, pictures: ClientPictures, reader: _Reader) -> ClientData:
    train, test = reader.read(pictures.train), reader.read(pictures.test)
    if pictures.val is None:
        row = {entry.path: number for number, entry in enumerate(train.entries)}
        splits = split_by_hash(train.entries, SPLIT)
        train_set, val_set = (
            train.images.rows([row[entry.path] for entry in splits[part]]) for part in ("train", "val")
        )
    else:
        train_set, val_set = train.images, reader.read(pictures.val).images
    if len(train_set) < 2:
        raise SourceError(f"{name}: {len(train_set)} training image(s); at least 2 are needed")
    return ClientData(train_set, val_set, test.images)


@dataclass(frozen=True)
class _Read:
    images: ImageSet
    entries: tuple[FileEntry, ...]


class _Reader:
    """Decodes pictures into one form and remembers which it could not."""

    def __init__(self, form: ImageForm, classes: tuple[str, ...]) -> None:
        self._form, self._classes = form, classes
        self.skipped: list[Skipped] = []

    def read(self, pictures: PicturesPerClass) -> _Read:
        """Decode in the order in which an agent reads its folder: by `CLASS/NAME`."""
        named = [
            (f"{self._classes[label]}/{picture.name}", label, picture)
            for label, of_class in enumerate(pictures)
            for picture in of_class
        ]
        named.sort(key=lambda one: one[0])
        return self._decoded(named)

    def unlabelled(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """Decode pictures in the order given: [N, C, H, W] uint8."""
        return self._decoded([(picture.where, 0, picture) for picture in pictures]).images.images

    def _decoded(self, named: Sequence[tuple[str, int, Picture]]) -> _Read:
        pixels = np.empty((len(named), self._form.channels, self._form.height, self._form.width), dtype=np.uint8)
        entries: list[FileEntry] = []
        for path, label, picture in named:
            try:
                content = picture.content()
                pixels[len(entries)] = decode_image(content, self._form, picture.where)
            except (DataError, OSError) as error:
                self.skipped.append(Skipped(picture.where, str(error)))
                continue
            entries.append(FileEntry(path, hashlib.sha256(content).hexdigest(), label))
        labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
        return _Read(ImageSet(torch.from_numpy(pixels[: len(entries)]), labels, self._classes), tuple(entries))
