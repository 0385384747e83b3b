"""An image file becomes pixels in a form, the same in training and at inference, and a bad file a clear error."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from export.model.runtime import load_image
from fedcg.imaging import ImageError, TooManyPixelsError, decode_image
from fedcg.learning.data import sources
from fedcg.learning.errors import DataError
from tests.support.learning.export_models import encoded, image_form, picture

FILES = {
    "a colour png": encoded(picture(1), "PNG"),
    "a png of exactly the size": encoded(picture(1, 20, 24), "PNG"),
    "a png with transparency": encoded(picture(1).convert("RGBA"), "PNG"),
    "a grey png": encoded(picture(1).convert("L"), "PNG"),
    "a palette png": encoded(picture(1).convert("P"), "PNG"),
    "a 16-bit png": encoded(Image.fromarray(np.arange(0, 60000, 40, dtype=np.uint16).reshape(30, 50)), "PNG"),
    "a 1-bit png": encoded(picture(1).convert("1"), "PNG"),
    "a large jpeg": encoded(picture(1, 300, 500), "JPEG", quality=80),
    "a cmyk jpeg": encoded(picture(1).convert("CMYK"), "JPEG"),
    "a bmp": encoded(picture(1), "BMP"),
    "a webp": encoded(picture(1), "WEBP"),
    "an animation": encoded(picture(1), "GIF", save_all=True, append_images=[picture(2), picture(3)]),
}


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_training_sees_the_same_pixels_with_the_channels_first(content: bytes, mode: str) -> None:
    form = image_form(mode)
    pixels = decode_image(content, form)
    assert pixels.dtype == np.uint8
    assert pixels.shape == form.shape == (20, 24, form.channels)
    assert pixels.flags.writeable  # in memory of its own
    np.testing.assert_array_equal(pixels.transpose(2, 0, 1), sources.decode_image(content, form, "one"))


def test_an_image_is_converted_then_resized_bilinearly_and_not_resampled_at_the_right_size() -> None:
    form = image_form()
    resized = picture(1).convert("RGB").resize((24, 20), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(decode_image(FILES["a colour png"], form), np.asarray(resized))
    fitting = decode_image(FILES["a png of exactly the size"], form)
    np.testing.assert_array_equal(fitting, np.asarray(picture(1, 20, 24)))


UNSOUND = {
    "nothing": (b"", "not an image"),
    "half a jpeg": (FILES["a large jpeg"][:3000], "damaged"),
    "half a png": (FILES["a colour png"][:200], "damaged"),
    "a format that is not read": (encoded(picture(1), "TGA"), "not an image"),
    "32 bits": (encoded(Image.fromarray(np.full((30, 50), 70_000, np.int32)), "TIFF"), "32 bits or floats"),
    "floats": (encoded(Image.fromarray(np.full((30, 50), 0.5, np.float32)), "TIFF"), "32 bits or floats"),
    "white as zero": (encoded(Image.fromarray(np.ones((9, 9), np.uint16)), "TIFF", tiffinfo={262: 0}), "white as zero"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "not an image"),
}


@pytest.mark.parametrize(("content", "reason"), UNSOUND.values(), ids=UNSOUND)
def test_a_file_that_is_no_sound_image_is_an_error_with_its_reason(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode_image(content, image_form())
    with pytest.raises(DataError, match=rf"^cat/a\.png: .*{reason}"):
        sources.decode_image(content, image_form(), "cat/a.png")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(["L", "RGB"]), form=st.sampled_from(["PNG", "TIFF", "PPM"]))
def test_grey_of_16_bits_is_the_same_image_in_8_bits_for_training_and_serving(seed: int, mode: str, form: str) -> None:
    grey = np.random.default_rng(seed).integers(0, 256, (30, 50), dtype=np.uint8)
    deep = encoded(Image.fromarray(grey.astype(np.uint16) * 257), form)
    expected = decode_image(encoded(Image.fromarray(grey), "PNG"), image_form(mode))
    np.testing.assert_array_equal(load_image(deep, image_form(mode)), expected)
    np.testing.assert_array_equal(sources.decode_image(deep, image_form(mode), "one"), expected.transpose(2, 0, 1))


@pytest.mark.parametrize("side", [8_000, 11_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int) -> None:
    body = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"nothing")
    chunks = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (body, data)]
    with pytest.raises(TooManyPixelsError, match="limit of 50000000"):
        decode_image(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), image_form())


def test_the_pixel_limit_is_the_callers() -> None:
    content = FILES["a colour png"]  # 33 x 47 = 1,551 pixels
    assert decode_image(content, image_form(), max_pixels=1551).shape == (20, 24, 3)
    with pytest.raises(TooManyPixelsError, match="47x33 pixels is over the limit of 1550"):
        decode_image(content, image_form(), max_pixels=1550)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(
        ["a colour png", "a cmyk jpeg", "an animation", "a webp", "a bmp", "a palette png", "a 16-bit png"]
    ),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12),
    keep=st.floats(0.05, 1),
)
def test_whatever_happens_to_a_file_it_is_an_image_or_an_image_error(
    name: str, changes: list[tuple[float, int]], keep: float
) -> None:
    content = bytearray(FILES[name])
    for position, value in changes:
        content[int(position * len(content))] = value
    try:
        pixels = decode_image(bytes(content[: int(keep * len(content))]), image_form())
    except ImageError:
        return
    assert pixels.shape == (20, 24, 3)
