"""Positions in the event log survive reconnecting and rotation."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.facts.events import EventFeed, EventFilter, Position, last_events
from fedcg import event_log
from fedcg.event_log import EventLog


def numbers(feed: EventFeed, position: Position) -> tuple[list[int], Position]:
    """Everything after a position."""
    found: list[int] = []
    while True:
        events, position = feed.read(position)
        if not events:
            return found, position
        found += [event["n"] for _, event in events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_reader_gets_every_event_once_whatever_position_it_goes_on_from(path: Path) -> None:
    log, feed = EventLog(path, lambda: 1.0), EventFeed(path)
    start = feed.end()
    for n in range(5):
        log.write("counted", n=n)
    events, end = feed.read(start)
    assert [event["n"] for _, event in events] == [0, 1, 2, 3, 4]
    for at, event in events:
        parsed = Position.parse(str(at))
        assert parsed is not None
        assert numbers(feed, parsed)[0] == list(range(event["n"] + 1, 5))
    log.write("counted", n=5)
    assert numbers(feed, end)[0] == [5]


def test_a_rotation_loses_nothing_that_a_reader_has_not_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 400)
    log, feed = EventLog(path, lambda: 1.0), EventFeed(path)
    log.write("counted", n=0)
    position = feed.end()
    n = 1
    while not path.with_suffix(".old.jsonl").exists():
        log.write("counted", n=n)
        n += 1
    log.write("counted", n=n)
    assert numbers(feed, position)[0] == list(range(1, n + 1))


def test_a_torn_line_waits_until_it_is_whole(path: Path) -> None:
    feed = EventFeed(path)
    path.write_bytes(b'{"t": 1, "event": "counted", "n": 0}\n{"t": 1, "eve')
    found, position = numbers(feed, Position(path.stat().st_ino, 0))
    assert found == [0]
    with path.open("ab") as log:
        log.write(b'nt": "counted", "n": 1}\nnot json\n{"t": 1, "event": "counted", "n": 2}\n')
    assert numbers(feed, position)[0] == [1, 2]


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-2", "a-b", "1-2-3", "9" * 30 + "-1"])
def test_what_is_no_position_is_none(text: str) -> None:
    assert Position.parse(text) is None


def test_a_position_of_a_file_that_is_gone_goes_on_with_the_oldest_event_left(path: Path) -> None:
    log = EventLog(path, lambda: 1.0)
    log.write("counted", n=7)
    assert numbers(EventFeed(path), Position(1, 10**6))[0] == [7]


def test_the_last_events_that_fit_come_newest_first_over_a_rotation(path: Path) -> None:
    old = EventLog(path.with_suffix(".old.jsonl"), lambda: 1.0)
    old.write("counted", n=1, client="a")
    log = EventLog(path, lambda: 2.0)
    log.write("counted", n=2, client="b")
    log.write("other", n=3, client="a")
    assert [event["n"] for event in last_events(path, EventFilter(), 10)] == [3, 2, 1]
    assert [event["n"] for event in last_events(path, EventFilter(event="counted"), 1)] == [2]
    assert [event["n"] for event in last_events(path, EventFilter(client="a"), 10)] == [3, 1]
    assert [event["n"] for event in last_events(path, EventFilter(text="OTHER"), 10)] == [3]
