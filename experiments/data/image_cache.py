"""Decodes pictures, and remembers the decoded image files of a large source on disk, since runs repeat over seeds and methods.

What is remembered is a copy of the images at the asked size in the user's own cache folder (`$XDG_CACHE_HOME/fedcg/images`),
found by the paths, sizes and times of all files; a changed file makes another copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

from experiments.data.lazy_images import FilePicture, Picture, RowPicture
from experiments.data.source import Source
from fedcg.learning.data.sources import decode_image, fit_pixels
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import SkippedImage
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
        files = sorted({picture.where for picture in _pictures(source) if picture.file is not None})
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
