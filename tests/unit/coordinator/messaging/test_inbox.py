"""The service's inbox: fair to the senders, bounded for each of them and in total, and woken from any thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from coordinator.messaging import event_queue as inbox_module
from coordinator.messaging.event_queue import Inbox


async def taken_from(box: Inbox[str], count: int) -> list[str | None]:
    return [await box.get(0.01) for _ in range(count)]


def test_the_inbox_gives_our_own_first_and_then_each_sender_a_turn_in_its_own_order() -> None:
    async def scenario() -> list[str | None]:
        box: Inbox[str] = Inbox(asyncio.get_running_loop())
        for name, sender in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
            box.put(name, 1, sender)
        box.put("ours")
        early = await taken_from(box, 4)
        box.put("c2", 1, "c")
        return early + await taken_from(box, 5)

    assert asyncio.run(scenario()) == ["ours", "a1", "b1", "c1", "a2", "b2", "c2", "a3", None]


def test_a_sender_that_fills_its_share_of_the_inbox_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_module, "ITEM_BYTES", 3)
    monkeypatch.setattr(inbox_module, "SENDER_BYTES", 10)

    async def scenario() -> tuple[list[str | None], int]:
        box: Inbox[str] = Inbox(asyncio.get_running_loop())
        for number in range(100):
            box.put(f"many{number}", 1, "many")
        for name, size in (("large", 6), ("too large", 6), ("small", 4)):
            box.put(name, size, "large")
        box.put("honest", 5, "honest")
        return await taken_from(box, 7), box.dropped

    taken, dropped = asyncio.run(scenario())
    assert taken == ["many0", "large", "honest", "many1", "small", "many2", None]
    assert dropped == 98


def test_the_inbox_is_bounded_in_total_and_never_drops_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "ITEM_BYTES", 1)
    monkeypatch.setattr(inbox_module, "MAX_BYTES", 10)

    async def scenario() -> tuple[list[str | None], int]:
        box: Inbox[str] = Inbox(asyncio.get_running_loop())
        for name, size in (("a", 6), ("b", 6), ("ours", 0), ("c", 4)):
            box.put(name, size, name)
        taken = await taken_from(box, 3)
        box.put("d", 10, "d")
        return taken + await taken_from(box, 2), box.dropped

    assert asyncio.run(scenario()) == (["ours", "a", "c", "d", None], 1)


def test_the_inbox_wakes_its_reader_from_any_thread() -> None:
    async def scenario() -> list[int]:
        box: Inbox[int] = Inbox(asyncio.get_running_loop())

        def fill() -> None:
            for number in range(500):
                box.put(number, 1, str(number))

        threads = [threading.Thread(target=fill) for _ in range(2)]
        for thread in threads:
            thread.start()
        taken: list[int] = []
        while len(taken) < 1000:
            item = await box.get(10.0)
            if item is not None:
                taken.append(item)
        return taken

    assert sorted(asyncio.run(scenario())) == sorted([*range(500), *range(500)])
