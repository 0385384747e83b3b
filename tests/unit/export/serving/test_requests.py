"""What a request's body may be, which requests are predicted together, and what becomes of those that are too many or gave up."""

import asyncio
import io
import json
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from export.errors import QueueFullError, RefusedError
from export.model.runtime import Floats
from export.serving import request_bodies
from export.serving.batcher import Batcher
from fedcg.imaging import Pixels
from tests.support.learning.export_models import encoded, image_form, picture

LIMITS = request_bodies.Limits(max_bytes=1_000_000, max_pixels=10_000, max_images=3)
FORM = image_form()  # 20 x 24, colour
ONE = np.arange(20 * 24 * 3, dtype=np.uint32).reshape(20, 24, 3) % 256


Body = tuple[bytes, str]
"""The bytes, and the Content-Type."""


def _json(images: object) -> Body:
    return json.dumps({"images": images}).encode(), request_bodies.JSON_TYPE


def _refusal(content: bytes, content_type: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        request_bodies.read_inputs(content, content_type, FORM, LIMITS)
    return caught.value


def test_arrays_are_one_image_or_a_batch() -> None:
    [(_, image)] = request_bodies.read_inputs(*_json(ONE.tolist()), FORM, LIMITS)
    np.testing.assert_array_equal(image, ONE)
    assert image.dtype == np.uint8
    images = request_bodies.read_inputs(*_json([ONE.tolist(), (255 - ONE.astype(int)).tolist()]), FORM, LIMITS)
    assert [name for name, _ in images] == ["images[0]", "images[1]"]
    np.testing.assert_array_equal(images[1][1], 255 - ONE)


def _with(value: object) -> object:
    rows = ONE.astype(object).tolist()
    rows[3][0][2] = value
    return rows


@pytest.mark.parametrize(
    ("images", "field", "told"),
    [
        (_with(256), "images[3][0][2]", "256 is not a valid pixel"),
        (_with(-1), "images[3][0][2]", "-1 is not a valid pixel"),
        (_with(10**30), "images[3][0][2]", r"1e\+30 is not a valid pixel; send whole numbers"),
        (_with(0.5), "images", "whole numbers"),
        (_with("7"), "images", "whole numbers"),
        (_with([1, 2]), "images", "unequal length"),
        (np.zeros((20, 24, 4), int).tolist(), "images", r"the shape is \[20, 24, 4\]; send .* \[20, 24, 3\]"),
        (np.zeros((1, 1, 20, 24, 3), int).tolist(), "images", "the shape is"),
        ([], "images", "the shape is"),
        ({"a": 1}, "images", "the shape is"),
    ],
)
def test_an_array_that_is_no_image_is_refused_with_what_is_taken(images: object, field: str, told: str) -> None:
    error = _refusal(*_json(images))
    assert (error.status, error.code, error.field) == (422, "bad_values", field)
    with pytest.raises(RefusedError, match=told):
        raise error


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"inputs": []}', b'{"images": [], "more": 1}', b"[" * 5000, b"\xff\xfe", b"NaN"]
)
def test_what_is_no_document_of_images_is_refused(content: bytes) -> None:
    error = _refusal(content, request_bodies.JSON_TYPE)
    assert (error.code, "the model takes images, RGB" in str(error)) == ("bad_json", True)


def test_more_json_than_the_images_need_is_refused_before_it_is_parsed() -> None:
    error = _refusal(b"[" * 100_000, request_bodies.JSON_TYPE)
    assert (error.status, error.code) == (413, "body_too_large")


def test_too_many_images_are_refused() -> None:
    assert _refusal(*_json([np.zeros((20, 24, 3), int).tolist()] * 4)).code == "too_many_images"


def _bomb() -> bytes:
    """A sound small PNG whose comment unpacks to 300 MB."""
    info = PngImagePlugin.PngInfo()
    packed = zlib.compressobj()
    comment = b"".join(packed.compress(bytes(1_000_000)) for _ in range(300)) + packed.flush()
    buffer = io.BytesIO()
    picture(1).save(buffer, "PNG", pnginfo=info)
    body = b"zTXtcomment\0\0" + comment
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    content = buffer.getvalue()
    return content[:33] + chunk + content[33:]  # after the header


@pytest.mark.parametrize(
    ("content", "status", "code", "told"),
    [
        (encoded(picture(1), "PNG")[:300], 422, "bad_image", "damaged"),
        (b"no image", 422, "bad_image", "not an image.*; the model takes images, RGB, resized to 24 x 20 pixels"),
        (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), 422, "bad_image", "32 bits or floats"),
        (encoded(Image.new("L", (100, 101)), "PNG"), 413, "image_too_large", "101.* over the limit of 10000"),
        (_bomb(), 422, "bad_image", "damaged"),
        (b"", 400, "empty_body", "is empty"),
    ],
    ids=["truncated", "text", "floats", "too many pixels", "a comment that unpacks to 300 MB", "nothing"],
)
def test_a_bad_file_refuses_the_request(content: bytes, status: int, code: str, told: str) -> None:
    error = _refusal(content, "image/png")
    assert (error.status, error.code, error.field) == (status, code, "image")
    with pytest.raises(RefusedError, match=told):
        raise error


@pytest.mark.parametrize("known", ["image/png", "image/x-whatever", "application/json", "application/octet-stream"])
def test_known_types_pass(known: str) -> None:
    request_bodies.check_type(f" {known.upper()} ; q=1", FORM)


async def _pieces(count: int, size: int, taken: list[int]) -> AsyncIterator[bytes]:
    for _ in range(count):
        taken.append(size)
        yield bytes(size)


def _read(bodies: request_bodies.Bodies, pieces: AsyncIterator[bytes], declared: int = 0) -> int:
    async def run() -> int:
        async with bodies.read(pieces, declared) as content:
            return len(content)

    return asyncio.run(run())


def test_a_body_over_the_limit_is_refused_at_the_piece_that_passes_it() -> None:
    bodies, taken = request_bodies.Bodies(request_bodies.Limits(100, 1, 1, body_s=5)), list[int]()
    assert _read(bodies, _pieces(10, 10, taken)) == 100
    taken.clear()
    with pytest.raises(RefusedError, match="larger than 100 bytes") as caught:
        _read(bodies, _pieces(1000, 10, taken))
    assert (caught.value.status, len(taken)) == (413, 11)
    taken.clear()
    with pytest.raises(RefusedError, match="larger than 100 bytes"):
        _read(bodies, _pieces(1000, 10, taken), declared=101)
    assert taken == []
    assert _read(bodies, _pieces(10, 10, taken)) == 100  # nothing of what was refused counts any more


def test_all_bodies_together_have_a_limit_that_ends_with_them() -> None:
    bodies = request_bodies.Bodies(request_bodies.Limits(100, 1, 1, body_s=5))

    async def run() -> None:
        held = [bodies.read(_pieces(1, 100, []), 100) for _ in range(request_bodies.BODIES_AT_ONCE)]
        for one in held:
            await one.__aenter__()
        with pytest.raises(RefusedError) as caught:
            async with bodies.read(_pieces(1, 1, []), 1):
                pass
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
        await held[0].__aexit__(None, None, None)
        async with bodies.read(_pieces(1, 1, []), 1) as content:
            assert content == bytes(1)

    asyncio.run(run())


def test_a_body_that_does_not_arrive_is_refused() -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"start"
        await asyncio.Event().wait()

    with pytest.raises(RefusedError, match=r"within 0\.01 s") as caught:
        _read(request_bodies.Bodies(request_bodies.Limits(100, 1, 1, body_s=0.01)), never())
    assert caught.value.status == 408


LONG_S = 30.0  # no test waits that long: it stands for "until somebody joins"


class Gate:
    """A model whose answer is the image's own number, and that predicts only while it is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.opened = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[int]] = []
        if is_open:
            self.opened.set()

    def predict(self, images: Sequence[Pixels]) -> Floats:
        self.batches.append([int(image[0]) for image in images])
        self.begun.set()
        assert self.opened.wait(LONG_S)
        if any(image[0] == 13 for image in images):
            raise RuntimeError("thirteen")
        return np.stack([image.astype(np.float32) for image in images])


def _images(*numbers: int) -> list[Pixels]:
    return [np.array([number], dtype=np.uint8) for number in numbers]


@asynccontextmanager
async def _running(
    max_batch: int = 4, max_wait_s: float = LONG_S, capacity: int = 100
) -> AsyncIterator[tuple[Batcher, list[int]]]:
    sizes: list[int] = []
    batcher = Batcher(max_batch=max_batch, max_wait_s=max_wait_s, capacity=capacity, observe=sizes.append)
    async with batcher.running():
        yield batcher, sizes


async def _ask(batcher: Batcher, model: Gate, *numbers: int) -> list[int]:
    with batcher.place() as predict:
        await asyncio.sleep(0)  # as a request that is still being decoded
        return [int(row[0]) for row in await predict(model, _images(*numbers))]


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """A test that runs on an event loop of its own."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def _a_few_steps() -> None:
    """Let other tasks go on until all that is possible has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


@on_a_loop
async def test_requests_that_come_together_are_predicted_together_up_to_the_limit() -> None:
    async with _running(max_batch=4) as (batcher, sizes):
        model = Gate()
        asked = (_ask(batcher, model, *numbers) for numbers in ((1,), (2, 3), (4,), (5, 6), (7,)))
        assert await asyncio.gather(*asked) == [[1], [2, 3], [4], [5, 6], [7]]
        assert model.batches == [[1, 2, 3, 4], [5, 6, 7]]
        assert sizes == [4, 3]


def test_the_first_request_of_a_batch_waits_for_one_that_is_coming_but_not_for_ever() -> None:
    async def run(max_wait_s: float) -> list[list[int]]:
        async with _running(max_wait_s=max_wait_s) as (batcher, _):
            model = Gate()
            with batcher.place() as coming:
                first = asyncio.create_task(_ask(batcher, model, 1))
                if max_wait_s < LONG_S:
                    assert await first == [1]
                else:
                    await _a_few_steps()
                await coming(model, _images(2))
                await first
            return model.batches

    assert asyncio.run(run(LONG_S)) == [[1, 2]]
    assert asyncio.run(run(0.01)) == [[1], [2]]


@on_a_loop
async def test_one_that_was_coming_and_gives_up_is_not_waited_for() -> None:
    async with _running() as (batcher, _):
        with batcher.place():
            first = asyncio.create_task(_ask(batcher, Gate(), 1))
            await _a_few_steps()
        assert await asyncio.wait_for(first, LONG_S / 2) == [1]


@on_a_loop
async def test_a_request_larger_than_a_batch_is_one_batch_of_its_own() -> None:
    async with _running(max_batch=2) as (batcher, _):
        model = Gate()
        assert await _ask(batcher, model, 1, 2, 3) == [1, 2, 3]
        assert model.batches == [[1, 2, 3]]


@on_a_loop
async def test_two_models_are_never_in_one_batch() -> None:
    async with _running(max_batch=8) as (batcher, sizes):
        old, new = Gate(), Gate()
        asked = (_ask(batcher, model, n) for model, n in ((old, 1), (old, 2), (new, 3), (old, 4)))
        assert await asyncio.gather(*asked) == [[1], [2], [3], [4]]
        assert (old.batches, new.batches, sizes) == ([[1, 2], [4]], [[3]], [2, 1, 1])


@on_a_loop
async def test_beyond_the_queue_a_request_is_refused_and_what_it_took_is_free_again() -> None:
    async with _running(capacity=3) as (batcher, _):
        model = Gate(is_open=False)
        first = asyncio.create_task(_ask(batcher, model, 1, 2))
        await asyncio.to_thread(model.begun.wait, LONG_S)
        with batcher.place() as predict:
            with pytest.raises(QueueFullError, match="3 images are waiting; the limit is 3"), batcher.place():
                pass
            with pytest.raises(QueueFullError):
                await predict(model, _images(3, 4))
        assert batcher.length == 2
        model.opened.set()
        assert await first == [1, 2]
        assert batcher.length == 0
        assert await _ask(batcher, model, 5, 6, 7) == [5, 6, 7]


@on_a_loop
async def test_a_request_that_gave_up_is_not_predicted_and_leaves_its_place() -> None:
    async with _running(max_batch=1) as (batcher, sizes):
        model = Gate(is_open=False)
        asked = [asyncio.create_task(_ask(batcher, model, number)) for number in (1, 2, 3)]
        await asyncio.to_thread(model.begun.wait, LONG_S)
        asked[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[1]
        assert batcher.length == 2
        model.opened.set()
        assert [await asked[0], await asked[2]] == [[1], [3]]
        assert (model.batches, sizes) == ([[1], [3]], [1, 1])


@on_a_loop
async def test_a_batch_that_fails_fails_for_those_in_it_alone() -> None:
    async with _running(max_batch=2) as (batcher, _):
        model = Gate()
        asked = (_ask(batcher, model, number) for number in (12, 13, 14))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(one) for one in found] == ["thirteen", "thirteen", "[14]"]


@on_a_loop
async def test_what_waits_is_still_answered_when_the_batcher_is_closed() -> None:
    async with _running(max_batch=1) as (batcher, _):
        model = Gate(is_open=False)
        asked = [asyncio.create_task(_ask(batcher, model, number)) for number in (1, 2, 3)]
        await asyncio.to_thread(model.begun.wait, LONG_S)
        model.opened.set()
    assert await asyncio.gather(*asked) == [[1], [2], [3]]
