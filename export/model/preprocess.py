"""An image file to the array that a model takes; torch-free. `fedcg.imaging` decodes it, as for training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.errors import InputError
from fedcg.errors import NOT_FOUND
from fedcg.image_form import ImageForm
from fedcg.imaging import MAX_PIXELS, ImageError, Pixels, decode_image, read_file


def load_image(source: Path | bytes, form: ImageForm, max_pixels: int = MAX_PIXELS, *, resize: bool = True) -> Pixels:
    """Decode one image and bring it to a model's form.

    Args:
        source: a file, or the bytes of one.
        form: mode and size that the model takes.
        max_pixels: larger images are refused from their header, before anything is decoded.
        resize: to the form's size; otherwise the image keeps its own.

    Returns:
        [height, width, channels] uint8, in memory of its own.

    Raises:
        InputError: no such file, not an image of a supported format, damaged, or over the pixel limit.
    """
    name, content = (str(source), _read(source)) if isinstance(source, Path) else ("image", source)
    try:
        return decode_image(content, form, max_pixels, resize=resize)
    except ImageError as error:
        raise InputError(name, str(error)) from error


def _read(path: Path) -> bytes:
    if not path.exists() and not path.is_symlink():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    if path.is_dir():
        raise InputError(str(path), "a folder without images")
    try:
        return read_file(path)
    except (ImageError, OSError) as error:
        raise InputError(str(path), getattr(error, "strerror", None) or str(error)) from error


def normalise(images: Pixels, form: ImageForm) -> npt.NDArray[np.float32]:
    """`(x / 255 - mean) / std` per channel, as in training: what a model without preprocessing takes.

    Args:
        images: [N, height, width, channels] uint8.
        form: whose statistics.

    Returns:
        [N, channels, height, width] float32.
    """
    mean, std = (np.asarray(values, dtype=np.float32).reshape(1, -1, 1, 1) for values in (form.mean, form.std))
    levels = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).astype(np.float32)
    normalised: npt.NDArray[np.float32] = (levels / np.float32(255) - mean) / std
    return normalised
