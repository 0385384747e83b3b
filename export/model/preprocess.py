"""An image file to the array that a model takes; numpy and Pillow only.

Must stay the same function of the file's bytes as the decoder that training uses (`fedcg.learning.data.image_folder`): `convert(mode)`, then
a bilinear resize of the width and after it of the height. Models resize and normalise in the same way (`export.build.preprocess_graph`).
Tests hold the three together.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from export.errors import InputError, TooLargeError

MAX_PIXELS = 50_000_000
# Raster formats with a decoder inside Pillow. Others are refused before they are parsed: EPS, for one, starts Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")

Pixels = npt.NDArray[np.uint8]


class PixelForm(Protocol):
    """The form a model takes images in; a manifest's `image` and a spec's both have it."""

    @property
    def mode(self) -> Literal["L", "RGB"]:
        """Grey or colour."""

    @property
    def height(self) -> int:
        """Rows of pixels."""

    @property
    def width(self) -> int:
        """Columns of pixels."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, of values in [0, 1]; subtracted."""

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel, of values in [0, 1]; divided by."""


def load_image(
    source: Path | bytes,
    form: PixelForm,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
    *,
    resize: bool = True,
) -> Pixels:
    """Decode one image and bring it to a model's form. Of an animation the first frame; EXIF orientation is ignored.

    Args:
        source: a file, or the bytes of one.
        form: mode and size that the model takes.
        max_pixels: larger images are refused from their header, before anything is decoded.
        name: what to call the image in errors; the path, or "image" for bytes.
        resize: to the form's size; otherwise the image keeps its own, and a model that has its preprocessing inside does the rest.

    Returns:
        [height, width, channels] uint8, in memory of its own.

    Raises:
        InputError: no such file, not an image of a supported format, or damaged.
        TooLargeError: over the pixel limit.
    """
    label = name or (str(source) if isinstance(source, Path) else "image")
    content = _read(source, label) if isinstance(source, Path) else source
    try:
        with warnings.catch_warnings():
            # Pillow warns about sizes that the limit below refuses, and about odd metadata.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise TooLargeError(label, f"{image.width}x{image.height} pixels is over the limit of {max_pixels}")
                return _fit(image, form, resize)
    except UnidentifiedImageError as error:
        raise InputError(label, f"not an image ({', '.join(FORMATS)} are read)") from error
    except Image.DecompressionBombError as error:
        raise TooLargeError(label, f"over the limit of {max_pixels} pixels") from error
    # What Pillow's decoders raise for bytes that break off or contradict themselves.
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        IndexError,
        KeyError,
        TypeError,
        struct.error,
        zlib.error,
    ) as error:
        raise InputError(label, f"damaged image ({error})") from error


def _read(path: Path, label: str) -> bytes:
    if not path.exists():
        raise InputError(label, "no such file")
    if not path.is_file():
        raise InputError(label, "a folder without images" if path.is_dir() else "not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(label, error.strerror or str(error)) from error


def normalise(images: Pixels, form: PixelForm) -> npt.NDArray[np.float32]:
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


def _fit(image: Image.Image, form: PixelForm, resize: bool) -> Pixels:
    fitted = image.convert(form.mode)
    if resize:  # in two steps: which side Pillow takes first when it is left to it changes with its version, and pixels with that
        fitted = fitted.resize((form.width, fitted.height), Image.Resampling.BILINEAR)
        fitted = fitted.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = np.array(fitted, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels
