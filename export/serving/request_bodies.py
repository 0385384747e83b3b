"""Decodes a request's body to a model's inputs: the bytes of one image, npy bytes, or JSON arrays. All sizes are checked before data is kept."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

import numpy as np
from pydantic_core import from_json

from export.errors import QueueFullError, RefusedError
from export.model.runtime import Sample, TooManyError, read_tensors
from fedcg.imaging import ImageError, TooManyPixelsError, decode_image
from fedcg.input_form import ImageForm, InputForm, TensorForm, taken_in_words
from fedcg.npy_arrays import NpyError
from fedcg.text_output import wrong_value
from fedcg.values import Value

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
IMAGE_TYPES = ("image/*", BYTES_TYPE, JSON_TYPE)
TENSOR_TYPES = (BYTES_TYPE, "application/x-npy", JSON_TYPE)
BODIES_AT_ONCE = 8
"""Memory for all bodies being read or decoded, as a multiple of the limit of one body."""
_JSON_BYTES_PER_VALUE = {"uint8": 16, "float32": 50}  # "255," or "-2.2250738585072014e-308,", and indentation
_JSON_BYTES_BESIDE = 4096

NamedInput = tuple[str, Sample]
"""The name of an input in the request, and the input in the model's form."""


class Limits(Value):
    """The limits of one request.

    Attributes:
        max_bytes: largest body in bytes.
        max_pixels: most pixels of an encoded image; larger ones are rejected by their header, before decoding.
        max_images: most images of one request.
        body_s: seconds in which a body must arrive.
    """

    max_bytes: int
    max_pixels: int
    max_images: int
    body_s: float = 20.0


class Bodies:
    """Reads bodies, and counts the bytes of all bodies in memory.

    Args:
        limits: limits of one request.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_bytes, self._seconds = limits.max_bytes, limits.body_s
        self._held = 0

    @asynccontextmanager
    async def read(self, pieces: AsyncIterator[bytes], declared: int) -> AsyncIterator[bytes]:
        """Read a body; its bytes count until the context ends.

        Args:
            pieces: the body as it arrives.
            declared: the request's Content-Length; 0 without one.

        Raises:
            RefusedError: the body is empty, too large or too slow, or memory for bodies is full. Nothing beyond the limit is kept.
        """
        if declared > self._max_bytes:
            raise self._too_large()
        kept: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._collect(pieces, kept), self._seconds)
            except asyncio.TimeoutError:
                message = f"the body did not arrive within {self._seconds:g} s; send it again over a faster connection"
                raise RefusedError(408, "slow_body", message, field="body") from None
            if not kept:
                raise RefusedError(400, "empty_body", "the body is empty; see /model for the expected input")
            kept[:] = [b"".join(kept)]  # free the pieces
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
                raise QueueFullError("the bodies of other requests use all memory for bodies")
            if piece:
                kept.append(piece)
                self._held += len(piece)

    def _too_large(self) -> RefusedError:
        message = f"the body is larger than {self._max_bytes} bytes; send fewer or smaller images, or raise --max-bytes of the server"
        return RefusedError(413, "body_too_large", message)


def media_type_of(content_type: str) -> str:
    """The type in a Content-Type header, without parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def check_type(content_type: str, form: InputForm) -> None:
    """Refuse a body of an unsupported type, before reading it.

    Raises:
        RefusedError: lists the supported types.
    """
    media_type = media_type_of(content_type)
    known = IMAGE_TYPES if isinstance(form, ImageForm) else TENSOR_TYPES
    if media_type in known or (isinstance(form, ImageForm) and media_type.startswith("image/")):
        return
    message = f"Content-Type {media_type[:80]!r} is not supported; {_taken(form)} as one of {', '.join(known)}"
    raise RefusedError(415, "unknown_type", message, field="Content-Type")


def _taken(form: InputForm) -> str:
    return f"the model takes {taken_in_words(form)}: send them"


def read_inputs(content: bytes, content_type: str, form: InputForm, limits: Limits) -> list[NamedInput]:
    """Decode a request's images or tensors; blocks while decoding.

    Raises:
        RefusedError: names the input and its error; one bad input refuses the whole request.
    """
    media_type = media_type_of(content_type)
    if media_type == JSON_TYPE:
        return _from_json(content, form, limits)
    if isinstance(form, TensorForm):
        return _from_npy(content, form, limits)
    return [("image", _decode(content, form, limits))]


def _decode(content: bytes, form: ImageForm, limits: Limits) -> Sample:
    if not content:
        raise RefusedError(400, "empty_body", "the body is empty; send the bytes of an image", field="image")
    try:
        return decode_image(content, form, limits.max_pixels)
    except TooManyPixelsError as error:
        message = f"{error}; make it smaller, or raise --max-pixels of the server"
        raise RefusedError(413, "image_too_large", message, field="image") from error
    except ImageError as error:
        raise RefusedError(422, "bad_image", f"{error}; {_taken(form)} as a whole image file", field="image") from error


def _too_many(most: int, what: str) -> RefusedError:
    return RefusedError(413, "too_many_images", f"the limit is {most} {what} per request; send several", field=what)


def _from_npy(content: bytes, form: TensorForm, limits: Limits) -> list[NamedInput]:
    try:
        return _named("inputs", read_tensors(content, form, limits.max_images))
    except TooManyError as error:
        raise _too_many(limits.max_images, "inputs") from error
    except NpyError as error:
        message = f"the body {error}; {_taken(form)} as one array in numpy's npy format, or as JSON"
        raise RefusedError(422, "bad_npy", message, field="body") from error


def _named(what: str, batch: Sample) -> list[NamedInput]:
    return [(f"{what}[{number}]", one) for number, one in enumerate(batch)]


def _from_json(content: bytes, form: InputForm, limits: Limits) -> list[NamedInput]:
    what = "images" if isinstance(form, ImageForm) else "inputs"
    most_bytes = limits.max_images * math.prod(form.shape) * _JSON_BYTES_PER_VALUE[form.dtype] + _JSON_BYTES_BESIDE
    if len(content) > most_bytes:
        message = f"JSON for {limits.max_images} {what} {form.shape} may have at most {most_bytes} bytes; send fewer"
        raise RefusedError(413, "body_too_large", message, field="body")
    wanted = f'{_taken(form)} as {{"{what}": ARRAY}}'
    try:
        document = from_json(content)
    except ValueError as error:
        wrong = wrong_value({"type": "json_invalid", "msg": str(error)})
        raise RefusedError(422, "bad_json", f"{wrong}; {wanted}", field="body") from error
    if not isinstance(document, dict) or set(document) != {what}:
        raise RefusedError(422, "bad_json", f"{wanted} without other fields", field="body")
    return _named(what, _array(document[what], form, what, limits.max_images))


def _array(values: object, form: InputForm, what: str, most: int) -> Sample:
    """[N, *shape] of nested lists, one input or a batch of them.

    The lists are checked before numpy allocates memory: one long string would make every element as long.
    """
    is_whole = form.dtype == "uint8"
    numbers = "whole numbers 0 to 255" if is_whole else "finite numbers"
    wanted = f"{numbers} as [{', '.join(map(str, form.shape))}] or a list of such {what}"
    wanted += "; other sizes only as encoded images" if isinstance(form, ImageForm) else ""

    def refusal(why: str, place: str = "") -> RefusedError:
        return RefusedError(422, "bad_values", f"{why}; send {wanted}", field=f"{what}{place}")

    sizes, first = [], values
    while isinstance(first, list):
        sizes.append(len(first))
        first = first[0] if first else None
    shape = (1, *sizes) if tuple(sizes) == form.shape else tuple(sizes)
    if not isinstance(values, list) or shape[1:] != form.shape or shape[0] == 0:
        raise refusal(f"the shape is {sizes}")
    if shape[0] > most:
        raise _too_many(most, what)
    level = values if shape == tuple(sizes) else [values]
    for size in form.shape:
        if any(not isinstance(one, list) or len(one) != size for one in level):
            raise refusal("rows of unequal length")
        level = list(chain.from_iterable(level))
    kinds = {type(one) for one in level}
    if list in kinds:
        raise refusal("rows of unequal length")
    if not kinds <= ({int} if is_whole else {int, float}):
        raise refusal(f"some values are not {'whole ' if is_whole else ''}numbers")
    try:
        flat = np.array(level, dtype=np.float64)
    except OverflowError:
        raise refusal("a number is out of range") from None
    is_good = (flat >= 0) & (flat <= 255) if is_whole else np.abs(flat) <= np.finfo(np.float32).max
    if not is_good.all():
        at = int(is_good.argmin())
        place = "".join(f"[{index}]" for index in np.unravel_index(at, sizes))
        raise refusal(f"{flat[at]:g} is not a valid {'pixel' if isinstance(form, ImageForm) else 'number'}", place)
    return flat.astype(form.dtype).reshape(shape)
