"""Which requests are predicted together, and what becomes of those that are too many or gave up."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps

import numpy as np
import pytest

from export.errors import QueueFullError
from export.model.runtime import Floats
from export.serving.batcher import Batcher
from fedcg.imaging import Pixels

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
async def test_a_request_alone_does_not_wait_for_others() -> None:
    async with _running() as (batcher, sizes):
        model = Gate()
        assert await asyncio.wait_for(_ask(batcher, model, 7), LONG_S / 2) == [7]
        assert (sizes, batcher.length) == ([1], 0)


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
            with (
                pytest.raises(QueueFullError, match="3 images wait already, and the queue takes 3"),
                batcher.place(),
            ):
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
