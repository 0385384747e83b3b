"""A request's body to images in a model's form: image bytes, multipart, or JSON arrays. Everything is bounded before it is kept."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

import numpy as np
from pydantic_core import from_json

from export.errors import QueueFullError, RefusedError
from fedcg.imaging import ImageError, Pixels, TooManyPixelsError, decode_image
from fedcg.input_form import ImageForm
from fedcg.text_output import wrong_value

JSON_TYPE = "application/json"
MULTIPART_TYPE = "multipart/form-data"
IMAGE_TYPES = ("image/*", "application/octet-stream")
BODIES_AT_ONCE = 8
"""All bodies that are being read or decoded may together take this many times the limit of one body."""
_JSON_BYTES_PER_VALUE = 16  # "255," and the indentation of a printed document
_JSON_BYTES_BESIDE = 4096
_MAX_NAME = 200
_MAX_PART_HEADERS = 16 * 1024


NamedImage = tuple[str, Pixels]
"""The name of an image in the request, and the image in the model's form."""


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    Attributes:
        max_bytes: bytes of a body.
        max_pixels: pixels of an encoded image; larger ones are refused from their header, undecoded.
        max_images: images of one request.
        body_s: seconds that a body may take to arrive.
    """

    max_bytes: int
    max_pixels: int
    max_images: int
    body_s: float = 20.0


class Bodies:
    """Reads bodies, and counts the bytes of all that are in memory.

    Args:
        limits: of one request.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_bytes, self._seconds = limits.max_bytes, limits.body_s
        self._held = 0

    @asynccontextmanager
    async def read(self, pieces: AsyncIterator[bytes], declared: int) -> AsyncIterator[bytes]:
        """The body, which counts until the context ends.

        Args:
            pieces: the body as it arrives.
            declared: the length that the request claims; 0 when it claims none.

        Raises:
            RefusedError: it is empty, too large or too slow, or too much is in memory already. Nothing beyond the limit is kept.
        """
        if declared > self._max_bytes:
            raise self._too_large()
        kept: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._collect(pieces, kept), self._seconds)
            except asyncio.TimeoutError:
                message = f"the body did not arrive within {self._seconds:g} s; send it again over a better link"
                raise RefusedError(408, "slow_body", message, field="body") from None
            if not kept:
                raise RefusedError(
                    400, "empty_body", "the body is empty; send the bytes of an image, multipart or JSON"
                )
            kept[:] = [b"".join(kept)]  # the pieces go
            yield kept[0]
        finally:
            self._held -= sum(map(len, kept))

    async def _collect(self, pieces: AsyncIterator[bytes], kept: list[bytes]) -> None:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > self._max_bytes:
                raise self._too_large()
            if self._held + len(piece) > BODIES_AT_ONCE * self._max_bytes:
                raise QueueFullError("the bodies of other requests fill the memory set aside for them")
            if piece:
                kept.append(piece)
                self._held += len(piece)

    def _too_large(self) -> RefusedError:
        message = f"a body may have {self._max_bytes} bytes; send fewer or smaller images, or start the server with --max-bytes"
        return RefusedError(413, "body_too_large", message)


def media_type_of(content_type: str) -> str:
    """The type that a Content-Type header names, without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def check_type(content_type: str) -> None:
    """Refuse a body of an unknown kind before it is read.

    Raises:
        RefusedError: neither an image, multipart nor JSON.
    """
    media_type = media_type_of(content_type)
    if media_type.startswith("image/") or media_type in (JSON_TYPE, MULTIPART_TYPE, *IMAGE_TYPES):
        return
    known = ", ".join((*IMAGE_TYPES, MULTIPART_TYPE, JSON_TYPE))
    raise RefusedError(
        415, "unknown_type", f"Content-Type {media_type[:80]!r} is not read; send one of {known}", field="Content-Type"
    )


def read_images(content: bytes, content_type: str, form: ImageForm, limits: Limits) -> list[NamedImage]:
    """Decode a request's images. Blocks for as long as that takes.

    Raises:
        RefusedError: names the image and what is wrong with it; one bad image refuses the whole request.
    """
    media_type = media_type_of(content_type)
    if media_type == JSON_TYPE:
        return _from_json(content, form, limits)
    if media_type != MULTIPART_TYPE:
        return [_decode("image", content, form, limits)]
    files = parse_multipart(content, content_type, limits.max_images)
    return [_decode(name, part, form, limits) for name, part in files]


def _decode(name: str, content: bytes, form: ImageForm, limits: Limits) -> NamedImage:
    if not content:
        raise RefusedError(400, "empty_body", f"{name} is empty; send the bytes of an image", field=name)
    try:
        return name, decode_image(content, form, limits.max_pixels)
    except TooManyPixelsError as error:
        message = f"{error}; make it smaller, or start the server with --max-pixels"
        raise RefusedError(413, "image_too_large", message, field=name) from error
    except ImageError as error:
        raise RefusedError(422, "bad_image", f"{error}; send a whole image file", field=name) from error


def parse_multipart(content: bytes, content_type: str, most: int) -> list[tuple[str, bytes]]:
    """Name and content of every part of a multipart body; the name is the file's, else the field's.

    Args:
        content: the whole body.
        content_type: its header, which names the boundary.
        most: parts that it may have.

    Raises:
        RefusedError: no boundary, more parts, a part that breaks off, or none.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = (header.get_boundary() or "").encode("latin-1", "replace")
    if not re.fullmatch(rb"[ -~]{1,70}", boundary):
        raise _bad_multipart("the Content-Type names no boundary of 1 to 70 characters", "Content-Type")
    delimiter = b"\r\n--" + boundary
    content = b"\r\n" + content
    if content.count(delimiter) > most + 1:
        raise _too_many(most)
    _, *sections = content.split(delimiter)
    if len(sections) < 2 or not sections[-1].startswith(b"--"):
        raise _bad_multipart("the body has no file, or breaks off before its last boundary")
    return [_part(section, number) for number, section in enumerate(sections[:-1])]


def _part(section: bytes, number: int) -> tuple[str, bytes]:
    line, _, rest = section.partition(b"\r\n")
    head, separator, content = (b"\r\n" + rest).partition(b"\r\n\r\n")
    if line.strip(b" \t") or not separator or len(head) > _MAX_PART_HEADERS:
        raise _bad_multipart(f"part {number} has no headers that end with an empty line")
    headers = BytesHeaderParser().parsebytes(head[2:])
    named = headers.get_filename() or headers.get_param("name", header="content-disposition")
    return (named if isinstance(named, str) and named else f"part {number}")[:_MAX_NAME], content


def _bad_multipart(why: str, field: str = "body") -> RefusedError:
    return RefusedError(400, "bad_multipart", f"{why}; send files as curl -F does", field=field)


def _too_many(most: int) -> RefusedError:
    return RefusedError(
        413, "too_many_images", f"a request may have {most} images; send several requests", field="images"
    )


def _from_json(content: bytes, form: ImageForm, limits: Limits) -> list[NamedImage]:
    shape = form.shape
    most_bytes = limits.max_images * int(np.prod(shape)) * _JSON_BYTES_PER_VALUE + _JSON_BYTES_BESIDE
    if len(content) > most_bytes:
        message = f"JSON for {limits.max_images} images {shape} has at most {most_bytes} bytes; send fewer images"
        raise RefusedError(413, "body_too_large", message, field="body")
    try:
        document = from_json(content)
    except ValueError as error:
        wrong = wrong_value({"type": "json_invalid", "msg": str(error)})
        raise RefusedError(422, "bad_json", f'{wrong}; send {{"images": ARRAY}}', field="body") from error
    if not isinstance(document, dict) or set(document) != {"images"}:
        raise RefusedError(422, "bad_json", 'send {"images": ARRAY} and nothing beside it', field="body")
    images = _pixels(document["images"], shape)
    if len(images) > limits.max_images:
        raise _too_many(limits.max_images)
    return [(f"images[{number}]", image) for number, image in enumerate(images)]


def _pixels(array: object, shape: Sequence[int]) -> Pixels:
    """[N, H, W, C] uint8 of nested lists, one image or a batch of them."""
    wanted = f"whole numbers 0 to 255 as [{', '.join(map(str, shape))}] or a list of such images"
    try:
        values = np.asarray(array)
    except ValueError:
        raise RefusedError(422, "bad_values", f"rows of unequal length; send {wanted}", field="images") from None
    images = values[None] if values.ndim == len(shape) else values
    if images.shape[1:] != tuple(shape) or len(images) == 0:
        message = f"the shape is {list(values.shape)}; send {wanted}; other sizes only as encoded images"
        raise RefusedError(422, "bad_values", message, field="images")
    if values.dtype.kind not in "iu":
        raise RefusedError(422, "bad_values", f"not only whole numbers; send {wanted}", field="images")
    wrong = np.argwhere((values < 0) | (values > 255))
    if len(wrong):
        place = "".join(f"[{index}]" for index in wrong[0])
        message = f"{values[tuple(wrong[0])]} is no pixel; send {wanted}"
        raise RefusedError(422, "bad_values", message, field=f"images{place}")
    return images.astype(np.uint8)
