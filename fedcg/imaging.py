"""An image file to pixels in the form that a network takes: the one decoder and resize of training, experiments and serving.

Grey of 16 bits to 8 by its top byte, `convert(mode)`, then a bilinear resize of the width and after it of the height; of an animation the first frame, EXIF orientation
ignored. A model does the same inside (`export.build.preprocess_graph`). Needs numpy and Pillow, no torch.
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
MAX_FILE_BYTES = 256 << 20  # an image at the limit of pixels has 200 MB where nothing compresses it
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
# Raster formats with a decoder inside Pillow. Others are refused before they are parsed: EPS, for one, starts Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of a TIFF

Pixels = npt.NDArray[np.uint8]


class ImageError(Exception):
    """Bytes that are no image of a supported format, or a damaged one; the message gives the reason and names no file."""


class TooManyPixelsError(ImageError):
    """An image over the pixel limit."""


def is_named_as_image(path: Path, suffixes: Collection[str]) -> bool:
    """Whether a name ends as an image's and is not hidden, as those of macOS's `._` files are."""
    return path.suffix.lower() in suffixes and not path.name.startswith(".")


def read_file(path: Path) -> bytes:
    """The bytes of an image file. Nothing but a regular file is opened: a FIFO never ends, and neither does a link to /dev/zero.

    Raises:
        ImageError: no file, a link to none, not a regular file, or one over 256 MiB.
        OSError: it can't be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        raise ImageError("a link to a file that is not there" if path.is_symlink() else "no such file") from error
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
        resize: to the form's size; otherwise the image keeps its own, and a model that has its preprocessing inside does the rest.

    Returns:
        [height, width, channels] uint8, in memory of its own.

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
    # The errors of Pillow's decoders for bytes that break off or contradict themselves.
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, struct.error, zlib.error) as error:
        raise ImageError(f"damaged image ({error})") from error


def fit_pixels(pixels: Pixels, form: ImageForm) -> Pixels:
    """[H, W] or [H, W, 3] uint8 to [height, width, channels] in a form, as if it came from a file without loss."""
    return _fit(Image.fromarray(np.ascontiguousarray(pixels)), form, resize=True)


def in_8_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits by its top byte, as Pillow reads colour of 16 bits; other images as they are. `convert` would clip it at 255.

    Raises:
        ImageError: whole numbers of 32 bits or floats, whose black and white are unknown; a TIFF of 12 bits or with white as zero.
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
    if resize:  # in two steps: which side Pillow takes first when it is left to it changes with its version, and pixels with that
        fitted = fitted.resize((form.width, fitted.height), Image.Resampling.BILINEAR)
        fitted = fitted.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = np.array(fitted, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels
