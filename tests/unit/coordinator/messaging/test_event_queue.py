"""The service's queue: fair to the senders, bounded for each of them and in total, and filled from any thread."""

import threading

import pytest

from coordinator.messaging import incoming
from coordinator.messaging.incoming import EventQueue


def taken_from(queue: EventQueue[str], count: int) -> list[str | None]:
    return [queue.get(0.01) for _ in range(count)]


def test_our_own_items_come_first_and_then_each_sender_has_a_turn_in_its_own_order() -> None:
    queue: EventQueue[str] = EventQueue()
    for name, sender in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")):
        queue.put(name, 1, sender)
    queue.put("ours")
    early = taken_from(queue, 4)
    queue.put("c2", 1, "c")
    assert early + taken_from(queue, 5) == ["ours", "a1", "b1", "c1", "a2", "b2", "c2", "a3", None]


def test_a_sender_that_fills_its_share_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "ITEM_BYTES", 3)
    monkeypatch.setattr(incoming, "SENDER_BYTES", 10)
    queue: EventQueue[str] = EventQueue()
    for number in range(100):
        queue.put(f"many{number}", 1, "many")
    for name, size in (("large", 6), ("too large", 6), ("small", 4)):
        queue.put(name, size, "large")
    queue.put("honest", 5, "honest")
    assert taken_from(queue, 7) == ["many0", "large", "honest", "many1", "small", "many2", None]
    assert queue.dropped == 98


def test_the_queue_is_bounded_in_total_and_never_drops_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "ITEM_BYTES", 1)
    monkeypatch.setattr(incoming, "MAX_BYTES", 10)
    queue: EventQueue[str] = EventQueue()
    for name, size in (("a", 6), ("b", 6), ("ours", 0), ("c", 4)):
        queue.put(name, size, name)
    taken = taken_from(queue, 3)
    queue.put("d", 10, "d")
    assert (taken + taken_from(queue, 2), queue.dropped) == (["ours", "a", "c", "d", None], 1)


def test_an_item_of_any_thread_wakes_the_reader() -> None:
    queue: EventQueue[int] = EventQueue()

    def fill() -> None:
        for number in range(500):
            queue.put(number, 1, str(number))

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < 1000:
        item = queue.get(10.0)
        assert item is not None
        taken.append(item)
    assert sorted(taken) == sorted([*range(500), *range(500)])
