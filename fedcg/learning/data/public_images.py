"""Reads unlabelled public images for a server half (FedDF) from disk, bounded and in the spec's form."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcg.imaging import is_named_as_image
from fedcg.learning.data.array_files import read_unlabelled
from fedcg.learning.data.sources import IMAGE_SUFFIXES, decode_image, fit_pixels, is_array_source, read_image
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import SkippedImage
from fedcg.learning.spec import ImageForm
from fedcg.values import Value

MAX_BYTES = 2 << 30  # of decoded images, which stay in memory while the process runs


class PublicImages(Value):
    """The public images that were read.

    Attributes:
        images: [N, C, H, W] uint8, N >= 1.
        found: number of images in the source; larger than N if the limit applied.
        skipped: images that could not be decoded.
    """

    images: torch.Tensor
    found: int
    skipped: tuple[SkippedImage, ...] = ()


def read_public(root: Path, form: ImageForm, most: int) -> PublicImages:
    """Read unlabelled images. Labels are ignored.

    Args:
        root: a folder with images anywhere below it, or an `.npz` with `images`.
        form: the spec's image form.
        most: maximum number of images; from a larger source, evenly spaced ones in the order of paths or rows.

    Raises:
        DataError: no images, none that can be decoded, or over 2 GiB when decoded; names the place.
    """
    names, decode = _source(root, form)
    chosen = spread(len(names), most)
    size = form.channels * form.height * form.width
    if len(chosen) * size > MAX_BYTES:
        raise DataError(
            f"{root}: {len(chosen)} images of {form.height}x{form.width} take more than {MAX_BYTES >> 30} GiB; "
            f"use at most {MAX_BYTES // size}"
        )
    pixels, skipped = [], []
    for index in chosen:
        name = names[index]
        try:
            pixels.append(decode(index))
        except (DataError, OSError) as error:
            skipped.append(SkippedImage(name, str(error)))
    if not pixels:
        raise DataError(f"{root}: none of {len(chosen)} public images can be read: {skipped[0].reason}")
    return PublicImages(torch.from_numpy(np.stack(pixels)), len(names), tuple(skipped))


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 .. count - 1, evenly spread."""
    return list(range(count)) if count <= most else [index * count // most for index in range(most)]


def _source(root: Path, form: ImageForm) -> tuple[Sequence[str], Callable[[int], NDArray[np.uint8]]]:
    """The names of all images, and a function that decodes one."""
    if is_array_source(root):
        images = read_unlabelled(root, form)
        return [f"{root}#{row}" for row in range(len(images))], lambda row: fit_pixels(images[row], form)
    if not root.is_dir():
        raise DataError(f"{root}: not a folder of public images, and not an .npz")
    paths = sorted(path for path in root.rglob("*") if is_named_as_image(path, IMAGE_SUFFIXES) and not path.is_dir())
    if not paths:
        raise DataError(f"{root}: no public images; expected {', '.join(sorted(IMAGE_SUFFIXES))} files in it")
    return [str(path) for path in paths], lambda at: decode_image(read_image(paths[at]), form, str(paths[at]))
