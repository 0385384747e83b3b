"""Images as training takes them, channels first: decoded by `fedcg.imaging`, an error names the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedcg import imaging
from fedcg.image_form import ImageForm
from fedcg.imaging import ImageError, Pixels
from fedcg.learning.errors import DataError


def decode_image(content: bytes, form: ImageForm, name: str) -> Pixels:
    """Bytes of one image file to [C, H, W] uint8 in the spec's form.

    Raises:
        DataError: not an image, damaged, or over 50 million pixels; names the file.
    """
    try:
        return _channels_first(imaging.decode_image(content, form))
    except ImageError as error:
        raise DataError(f"{name}: {error}") from error


def read_image(path: Path) -> bytes:
    """The bytes of an image file.

    Raises:
        DataError: `fedcg.imaging.read_file` opens no such file; names it.
        OSError: it can't be read.
    """
    try:
        return imaging.read_file(path)
    except ImageError as error:
        raise DataError(f"{path}: {error}") from error


def fit_pixels(pixels: Pixels, form: ImageForm) -> Pixels:
    """[H, W] or [H, W, 3] uint8 to [C, H, W] in the spec's form, as if it came from a file without loss."""
    return _channels_first(imaging.fit_pixels(pixels, form))


def _channels_first(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
