"""Decodes and resizes image files into a network's input form, for training, experiments and serving.

The steps: reduce 16-bit grey to its top byte, `convert(mode)`, then a bilinear resize of the width and after it of the height. Of an
animation the first frame is used; EXIF orientation is ignored. A model does the same inside (`export.build.preprocess_graph`). Needs
numpy and Pillow, no torch.
"""

import errno
import io
import stat
import struct
import warnings
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from fedcg.input_form import ImageForm

MAX_PIXELS = 50_000_000
MAX_FILE_BYTES = 256 << 20  # an uncompressed image at the pixel limit has 200 MB
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
# Raster formats that Pillow decodes itself. Others are refused before they are parsed: EPS, for example, starts Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of a TIFF

Pixels = npt.NDArray[np.uint8]


class ImageError(Exception):
    """Bytes that are not an image of a supported format, or a damaged image. The message gives the reason and names no file."""


class TooManyPixelsError(ImageError):
    """An image over the pixel limit."""


def is_named_as_image(path: Path, suffixes: Collection[str]) -> bool:
    """Whether a name has the suffix of an image and is not hidden, as macOS's `._` files are."""
    return path.suffix.lower() in suffixes and not path.name.startswith(".")


def read_file(path: Path) -> bytes:
    """The bytes of an image file. Only a regular file is opened: a FIFO or a link to /dev/zero never ends.

    Raises:
        ImageError: there is no file, a link has no target, it is not a regular file, or it is over 256 MiB.
        OSError: it can't be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        raise ImageError("a link to a file that does not exist" if path.is_symlink() else "no such file") from error
    if not stat.S_ISREG(found.st_mode):
        raise ImageError("not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise ImageError(f"{found.st_size} bytes is over the limit of {MAX_FILE_BYTES >> 20} MiB")
    with path.open("rb") as file:
        return file.read(found.st_size)


def decode_image(content: bytes, form: ImageForm, max_pixels: int = MAX_PIXELS, *, resize: bool = True) -> Pixels:
    """Decode one image and bring it to a form.

    Args:
        content: the bytes of an image file.
        form: mode and size.
        max_pixels: larger images are refused from their header, before anything is decoded.
        resize: to the form's size. Otherwise the image keeps its size, for a model that contains its preprocessing.

    Returns:
        [height, width, channels] uint8, in separate memory.

    Raises:
        ImageError: not an image of a supported format, or damaged.
        TooManyPixelsError: over the pixel limit.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns about sizes that the limit below refuses, and about odd metadata.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise TooManyPixelsError(f"{image.width}x{image.height} pixels is over the limit of {max_pixels}")
                return _fit(image, form, resize=resize)
    except UnidentifiedImageError as error:
        raise ImageError(f"not an image ({', '.join(FORMATS)} are read)") from error
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"over the limit of {max_pixels} pixels") from error
    # Errors of Pillow's decoders for truncated or inconsistent bytes.
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, struct.error, zlib.error) as error:
        raise ImageError(f"damaged image ({error})") from error


def fit_pixels(pixels: Pixels, form: ImageForm) -> Pixels:
    """[H, W] or [H, W, 3] uint8 to [height, width, channels] in a form, like an image from a lossless file."""
    return _fit(Image.fromarray(np.ascontiguousarray(pixels)), form, resize=True)


def in_8_bits(image: Image.Image) -> Image.Image:
    """A 16-bit grey image reduced to its top byte, as Pillow reads 16-bit colour; other images unchanged. `convert` would clip at 255.

    Raises:
        ImageError: 32-bit integers or floats, whose black and white are unknown; a TIFF of 12 bits or with white as zero.
    """
    if image.mode[0] not in "IF":
        return image
    # Pillow before 11 reads a PNG of 16 bits as "I"; it scales every PGM to 16 bits.
    is_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    tags = getattr(image, "tag_v2", {})
    if not is_16_bits or tags.get(_BITS_PER_SAMPLE, (16,)) != (16,) or tags.get(_PHOTOMETRIC, 1) != 1:
        kinds = "grey of 32 bits or floats, of 12 bits, or with white as zero"
        raise ImageError(f"{kinds}, whose shades are not known; save it with 8 or 16 bits and black as zero")
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _fit(image: Image.Image, form: ImageForm, *, resize: bool) -> Pixels:
    fitted = in_8_bits(image).convert(form.mode)
    if resize:  # in two steps: the side that Pillow resizes first depends on its version, and changes pixels
        fitted = fitted.resize((form.width, fitted.height), Image.Resampling.BILINEAR)
        fitted = fitted.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = np.array(fitted, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels
