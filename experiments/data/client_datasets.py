"""The images of every client of a simulation, decoded into memory: the same deal and the same split as the demo writes.

Keeps decoded images of a large source in the user's cache folder, found by paths, sizes and times of all files. Uses torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray

from experiments.data.deal import ClientPictures, DealOptions, deal_out, draw_unheld
from experiments.data.source import FilePicture, Picture, PicturesPerClass, RowPicture, Source
from experiments.errors import SourceError
from fedcg.learning.data.image_folder import split_by_hash
from fedcg.learning.data.sources import decode_image, fit_pixels
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry, ImageSet, SkippedImage
from fedcg.learning.simulation.party import ClientData
from fedcg.learning.spec import ImageForm

REMEMBERED_FROM = 5000  # image files; fewer are decoded in a second
KEPT = 6  # copies; the oldest goes
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Decoded:
    """One picture's pixels, [C, H, W] uint8, and the sha256 of its image file; None where it is not needed."""

    pixels: NDArray[np.uint8]
    sha256: str | None


class Decoder:
    """Decodes pictures into one form.

    Args:
        form: the spec's image form.
    """

    def __init__(self, form: ImageForm) -> None:
        self._form = form
        self._known: dict[str, Decoded | SkippedImage] = {}

    def __call__(self, picture: Picture, *, is_hashed: bool) -> Decoded | SkippedImage:
        """Decode a picture, or give the reason why it can't be decoded.

        Args:
            picture: any.
            is_hashed: whether the sha256 of its image file is needed; of an array's row there is none until it is made.
        """
        known = self._known.get(picture.where)
        if known is not None:
            return known
        try:
            if isinstance(picture, RowPicture):
                digest = hashlib.sha256(picture.content()).hexdigest() if is_hashed else None
                return Decoded(fit_pixels(picture.images[picture.row], self._form), digest)
            return self._of_file(picture.content(), picture.where)
        except (DataError, OSError) as error:
            return SkippedImage(picture.where, str(error))

    def _of_file(self, content: bytes, where: str) -> Decoded:
        return Decoded(decode_image(content, self._form, where), hashlib.sha256(content).hexdigest())

    def remember(self, source: Source, cache: Path | None = None) -> None:
        """Have all image files of a large source at hand: from the copy on disk, or decode them once and make it.

        Args:
            source: the images.
            cache: folder of the copies; the user's cache folder when None. Where nothing can be written, nothing is kept.
        """
        files = sorted({picture.where for picture in _pictures(source) if isinstance(picture, FilePicture)})
        if len(files) < REMEMBERED_FROM:
            return
        folder = (cache or user_cache("images")) / _key(files, self._form)
        try:
            if not folder.is_dir():
                self._write(folder, files)
            self._known = _read(folder, files, self._form)
        except (OSError, ValueError, KeyError):
            self._known = {}  # no cache folder that could be used: images are decoded one by one as they are needed

    def _write(self, folder: Path, files: list[str]) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)[: -KEPT + 1]:
            shutil.rmtree(old, ignore_errors=True)
        making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
        try:
            shape = (len(files), self._form.channels, self._form.height, self._form.width)
            pixels = np.lib.format.open_memmap(making / "pixels.npy", "w+", np.dtype(np.uint8), shape)
            hashes: list[str] = []
            skipped: dict[str, str] = {}
            for row, file in enumerate(files):
                found = self(FilePicture(Path(file)), is_hashed=True)
                if isinstance(found, SkippedImage):
                    skipped[file] = found.reason
                else:
                    pixels[row] = found.pixels
                hashes.append("" if isinstance(found, SkippedImage) else found.sha256 or "")
            pixels.flush()
            (making / "files.json").write_text(json.dumps({"format": _FORMAT, "sha256": hashes, "skipped": skipped}))
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster with the same
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)


def user_cache(name: str) -> Path:
    """A folder of ours in the user's cache folder: `images` holds decoded ones, `datasets` data sets by name."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcg" / name


def _pictures(source: Source) -> Iterator[Picture]:
    for part in (source.train, source.test, source.val):
        for of_class in part or ():
            yield from of_class
    for domain in source.domains:
        yield from _pictures(domain)


def _key(files: Iterable[str], form: ImageForm) -> str:
    """Names a copy: the files' paths, sizes and times, the form, and what decodes."""
    digest = hashlib.sha256(f"{_FORMAT} {PIL.__version__} {form.mode} {form.width}x{form.height}\n".encode())
    for file in files:
        status = os.stat(file)  # noqa: PTH116 - a Path for each of 60,000 files takes longer than the call
        digest.update(
            f"{Path(file).resolve() if not file.startswith('/') else file}\0{status.st_size} {status.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()[:32]


def _read(folder: Path, files: list[str], form: ImageForm) -> dict[str, Decoded | SkippedImage]:
    pixels = np.load(folder / "pixels.npy", mmap_mode="r")
    record = json.loads((folder / "files.json").read_text())
    if pixels.shape != (len(files), form.channels, form.height, form.width) or len(record["sha256"]) != len(files):
        raise ValueError(f"{folder} holds other images than its name stands for")
    skipped: dict[str, str] = record["skipped"]
    return {
        file: SkippedImage(file, skipped[file]) if file in skipped else Decoded(pixels[row], record["sha256"][row])
        for row, file in enumerate(files)
    }


# As the agent splits a folder that has a test part.
SPLIT = {"train": 0.9, "val": 0.1}


@dataclass(frozen=True)
class Cohort:
    """All clients' images.

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
    skipped: tuple[SkippedImage, ...] = ()
    domains: Mapping[str, str] | None = None


def build_cohort(source: Source, form: ImageForm, options: DealOptions, cache: Path | None = None) -> Cohort:
    """Deal a source out and decode what was dealt.

    Args:
        source: the images.
        form: the spec's image form.
        options: what decides who gets what.
        cache: folder of the decoded copy of a large source; the user's cache folder when None.

    Raises:
        SourceError: too few images for so many clients; no client with two that can be decoded; no such domains.
    """
    deal = deal_out(source, options)
    decoder = Decoder(form)
    decoder.remember(source, cache)
    reader = _Reader(form, deal.classes, decoder)
    datasets = {name: _client_data(name, pictures, reader) for name, pictures in deal.clients.items()}
    if all(len(data.train) < 2 for data in datasets.values()):
        raise SourceError("no client has the 2 training images that are needed at least")
    common = reader.read(deal.common).images
    public = reader.unlabelled(deal.public) if deal.public else None
    domains = {name: one.domain for name, one in deal.clients.items() if one.domain is not None}
    return Cohort(datasets, common, public, deal.classes, reader.skipped, domains)


def unheld_images(
    source: Source, form: ImageForm, options: DealOptions, most: int, cache: Path | None = None
) -> ImageSet:
    """At most `most` images of a source, drawn by the deal's seed, that no client holds; the common test set where there are none.

    Args:
        source: the images.
        form: the spec's image form.
        options: what decided who got what.
        most: images.
        cache: as for `build_cohort`.
    """
    decoder = Decoder(form)
    decoder.remember(source, cache)
    pictures = draw_unheld(source, deal_out(source, options), most, options.seed)
    return _Reader(form, source.classes, decoder).read(pictures).images


def _client_data(name: str, pictures: ClientPictures, reader: _Reader) -> ClientData:
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


@dataclass(frozen=True)
class _Read:
    images: ImageSet
    entries: tuple[FileEntry, ...]


class _Reader:
    """Reads pictures into image sets and remembers which it could not read."""

    def __init__(self, form: ImageForm, classes: tuple[str, ...], decoder: Decoder) -> None:
        self._form, self._classes, self._decoder = form, classes, decoder
        self._skipped: dict[str, SkippedImage] = {}

    @property
    def skipped(self) -> tuple[SkippedImage, ...]:
        """What could not be read, each image once."""
        return tuple(self._skipped.values())

    def read(self, pictures: PicturesPerClass, *, is_hashed: bool = False) -> _Read:
        """Decode in the order in which an agent reads its folder: by `CLASS/NAME`."""
        named = [
            (f"{self._classes[label]}/{picture.name}", label, picture)
            for label, of_class in enumerate(pictures)
            for picture in of_class
        ]
        named.sort(key=lambda one: one[0])
        return self._decoded(named, is_hashed=is_hashed)

    def unlabelled(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """Decode pictures in the order given: [N, C, H, W] uint8."""
        return self._decoded([(picture.where, 0, picture) for picture in pictures], is_hashed=False).images.images

    def _decoded(self, named: Sequence[tuple[str, int, Picture]], *, is_hashed: bool) -> _Read:
        pixels = np.empty((len(named), self._form.channels, self._form.height, self._form.width), dtype=np.uint8)
        entries: list[FileEntry] = []
        for path, label, picture in named:
            found = self._decoder(picture, is_hashed=is_hashed)
            if isinstance(found, SkippedImage):
                self._skipped[found.file] = found
                continue
            pixels[len(entries)] = found.pixels
            entries.append(FileEntry(path, found.sha256 or "", label))
        labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
        return _Read(ImageSet(torch.from_numpy(pixels[: len(entries)]), labels, self._classes), tuple(entries))
