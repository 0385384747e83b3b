"""The images of all clients of a simulation, decoded into memory, with the same partition and split as the demo. Uses torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from experiments.data.deal import ClientPictures, DealOptions, deal_out, draw_unheld
from experiments.data.source import Picture, PicturesPerClass, RowPicture, Source
from experiments.errors import SourceError
from fedcg.learning.data.image_folder import LocalImages, split_by_hash
from fedcg.learning.data.sources import decode_image, empty_rows, fit_row
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry, ImageSet, SkippedImage
from fedcg.learning.simulation.party import ClientData
from fedcg.learning.spec import ImageForm, InputForm
from fedcg.values import Value


def decode(picture: Picture, form: InputForm, *, is_hashed: bool) -> tuple[NDArray[Any], str] | SkippedImage:
    """Decode a picture into a form: its pixels, [C, H, W] uint8, or a tensor, and the sha256 of its file; or return why it can't be decoded.

    Args:
        picture: any picture.
        form: the spec's input form.
        is_hashed: whether the sha256 is needed, else it may be empty; for an array's row, the file is created first.
    """
    try:
        if isinstance(picture, RowPicture):
            digest = hashlib.sha256(picture.content()).hexdigest() if is_hashed else ""
            return fit_row(picture.images[picture.row], form), digest
        assert isinstance(form, ImageForm)
        content = picture.content()
        return decode_image(content, form, picture.where), hashlib.sha256(content).hexdigest()
    except (DataError, OSError) as error:
        return SkippedImage(picture.where, str(error))


# As the agent splits a folder with a test part.
SPLIT = {"train": 0.9, "val": 0.1}


class Cohort(Value):
    """All clients' images.

    Attributes:
        clients: by id, in id order.
        common: one test set for all.
        public: [N, *tensor_shape] unlabelled, for the server, or None.
        classes: class names in label order.
        skipped: images that were left out, in the order of reading.
        domains: client id to the name of its domain; empty unless the partition is by domain.
    """

    clients: Mapping[str, ClientData]
    common: ImageSet
    public: torch.Tensor | None
    classes: tuple[str, ...]
    skipped: tuple[SkippedImage, ...] = ()
    domains: Mapping[str, str] | None = None


def build_cohort(source: Source, form: InputForm, options: DealOptions) -> Cohort:
    """Partition a source and decode its images.

    Args:
        source: the images.
        form: the spec's input form.
        options: the settings of the partition.

    Raises:
        SourceError: too few images for the clients; no client with two readable images; unknown domains.
    """
    deal = deal_out(source, options)
    reader = _Reader(form, deal.classes)
    datasets = {name: _client_data(pictures, reader) for name, pictures in deal.clients.items()}
    if all(len(data.train) < 2 for data in datasets.values()):
        raise SourceError("no client has 2 training images, the minimum")
    common = reader.read(deal.common).images
    public = reader.unlabelled(deal.public) if deal.public else None
    domains = {name: one.domain for name, one in deal.clients.items() if one.domain is not None}
    return Cohort(datasets, common, public, deal.classes, reader.skipped, domains)


def unheld_images(source: Source, form: InputForm, options: DealOptions, most: int) -> ImageSet:
    """Return at most `most` images of a source that no client holds, drawn by the partition's seed; the common test set if there are none.

    Args:
        source: the images.
        form: the spec's input form.
        options: the settings of the partition.
        most: maximum number of images.
    """
    pictures = draw_unheld(source, deal_out(source, options), most, options.seed)
    return _Reader(form, source.classes).read(pictures).images


def _client_data(pictures: ClientPictures, reader: _Reader) -> ClientData:
    test = reader.read(pictures.test)
    if pictures.val is None:
        train = reader.read(pictures.train, is_hashed=True)
        row = {entry.path: number for number, entry in enumerate(train.entries)}
        splits = split_by_hash(train.entries, SPLIT)
        train_set, val_set = (
            train.images.rows([row[entry.path] for entry in splits[part]]) for part in ("train", "val")
        )
    else:
        train_set, val_set = reader.read(pictures.train).images, reader.read(pictures.val).images
    return ClientData(train_set, val_set, test.images)


class _Reader:
    """Reads pictures into image sets and records unreadable ones."""

    def __init__(self, form: InputForm, classes: tuple[str, ...]) -> None:
        self._form, self._classes = form, classes
        self._skipped: dict[str, SkippedImage] = {}
        # By identity: a deal, which lives longer, may give all clients one test set.
        self._unhashed: dict[int, LocalImages] = {}

    @property
    def skipped(self) -> tuple[SkippedImage, ...]:
        """The unreadable images, each once."""
        return tuple(self._skipped.values())

    def read(self, pictures: PicturesPerClass, *, is_hashed: bool = False) -> LocalImages:
        """Decode in the order in which an agent reads its folder, by `CLASS/NAME`; each picture only once."""
        if not is_hashed and id(pictures) in self._unhashed:
            return self._unhashed[id(pictures)]
        named = [
            (f"{self._classes[label]}/{picture.name}", label, picture)
            for label, of_class in enumerate(pictures)
            for picture in of_class
        ]
        named.sort(key=lambda one: one[0])
        read = self._decoded(named, is_hashed=is_hashed)
        if not is_hashed:
            self._unhashed[id(pictures)] = read
        return read

    def unlabelled(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """Decode pictures in the given order: [N, *tensor_shape]."""
        return self._decoded([(picture.where, 0, picture) for picture in pictures], is_hashed=False).images.images

    def _decoded(self, named: Sequence[tuple[str, int, Picture]], *, is_hashed: bool) -> LocalImages:
        pixels = empty_rows(len(named), self._form)
        entries: list[FileEntry] = []
        for path, label, picture in named:
            found = decode(picture, self._form, is_hashed=is_hashed)
            if isinstance(found, SkippedImage):
                self._skipped[found.file] = found
                continue
            pixels[len(entries)], sha256 = found
            entries.append(FileEntry(path, sha256, label))
        labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
        return LocalImages(ImageSet(torch.from_numpy(pixels[: len(entries)]), labels, self._classes), entries)
