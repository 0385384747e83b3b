"""One image to the spec's form: the same function of a file's bytes as `export.model.preprocess` is at inference.

`convert(mode)`, then a bilinear resize of the width and after it of the height; the first frame, EXIF orientation ignored.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedcg.learning.errors import DataError
from fedcg.learning.spec import ImageForm

MAX_PIXELS = 50_000_000  # the same bound as at inference: larger files are refused before they are decoded
# The formats that are read at inference: raster formats with a decoder inside Pillow. EPS, for one, would start Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")


def decode_image(content: bytes, form: ImageForm, name: str) -> NDArray[np.uint8]:
    """Bytes of one image file to [C, H, W] uint8 in the spec's form.

    Raises:
        DataError: not an image, damaged, or over 50 million pixels; names the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that the limit below refuses, and of odd metadata
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{name}: {image.width}x{image.height} pixels is over the limit of {MAX_PIXELS}")
                return _fit(image, form)
    except UnidentifiedImageError as error:
        raise DataError(f"{name}: not an image ({', '.join(FORMATS)} are read)") from error
    # What Pillow's decoders raise for bytes that break off or contradict themselves.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error,
            Image.DecompressionBombError) as error:  # fmt: skip
        raise DataError(f"{name}: damaged image ({error})") from error


def fit_pixels(pixels: NDArray[np.uint8], form: ImageForm) -> NDArray[np.uint8]:
    """[H, W] or [H, W, 3] uint8 to [C, H, W] in the spec's form, as if it came from a file without loss."""
    return _fit(Image.fromarray(np.ascontiguousarray(pixels)), form)


def _fit(image: Image.Image, form: ImageForm) -> NDArray[np.uint8]:
    fitted = image.convert(form.mode)
    # In two steps: which side Pillow takes first when it is left to it changes with its version, and pixels with that.
    fitted = fitted.resize((form.width, fitted.height), Image.Resampling.BILINEAR)
    fitted = fitted.resize((form.width, form.height), Image.Resampling.BILINEAR)
    array = np.asarray(fitted, dtype=np.uint8)
    return array[None] if form.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))
