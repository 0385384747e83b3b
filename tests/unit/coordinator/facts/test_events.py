"""Cursors in the event log survive reconnecting and rotation; a filter looks at fields, sentences and levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.facts.events import OLDEST, EventFilter, in_words, last_events, read_on, read_page, start_of
from fedcg import event_log
from fedcg.event_log import EventLog
from fedcg.log.sentences import DECLINE_ADVICE


def numbers(path: Path, cursor: str) -> tuple[list[int], str]:
    """Everything after a cursor."""
    found: list[int] = []
    while True:
        page = read_on(path, cursor)
        cursor, before = page.newer or cursor, cursor
        found += [event["n"] for event in page.events]
        if cursor == before:
            return found, cursor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_reader_gets_every_event_once_whatever_cursor_it_goes_on_from(path: Path) -> None:
    log = EventLog(path, lambda: 1.0)
    start = start_of(path, "")
    for n in range(5):
        log.write("counted", n=n)
    page = read_on(path, start)
    assert [event["n"] for event in page.events] == [0, 1, 2, 3, 4]
    for cursor, event in page.lines:
        assert start_of(path, cursor) == cursor
        assert numbers(path, cursor)[0] == list(range(event["n"] + 1, 5))
    log.write("counted", n=5)
    assert numbers(path, str(page.newer))[0] == [5]
    assert numbers(path, start_of(path, "nonsense"))[0] == []


def test_a_rotation_loses_nothing_that_a_reader_has_not_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 400)
    log = EventLog(path, lambda: 1.0)
    log.write("counted", n=0)
    cursor = start_of(path, "")
    n = 1
    while not path.with_suffix(".old.jsonl").exists():
        log.write("counted", n=n)
        n += 1
    log.write("counted", n=n)
    assert numbers(path, cursor)[0] == list(range(1, n + 1))
    assert numbers(path, OLDEST)[0] == list(range(n + 1))


def test_a_torn_line_waits_until_it_is_whole(path: Path) -> None:
    path.write_bytes(b'{"t": 1, "event": "counted", "n": 0}\n{"t": 1, "eve')
    found, cursor = numbers(path, OLDEST)
    assert found == [0]
    assert [event["n"] for event in read_page(path, 10, lambda _: True).events] == [0]
    with path.open("ab") as log:
        log.write(b'nt": "counted", "n": 1}\nnot json\n{"t": 1, "event": "counted", "n": 2}\n')
    assert numbers(path, cursor)[0] == [1, 2]


def test_a_torn_line_that_is_longer_than_a_read_is_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.facts.events.ON_BYTES", 64)
    path.write_bytes(b"x" * 150 + b'\n{"t": 1, "event": "counted", "n": 0}\n')
    assert numbers(path, OLDEST)[0] == [0]


@pytest.mark.parametrize("text", ["", "1", "1.", "-1.2", "x.y", "1.2.3", "9" * 30 + ".1"])
def test_what_is_no_cursor_starts_at_the_end(path: Path, text: str) -> None:
    EventLog(path, lambda: 1.0).write("counted", n=0)
    assert numbers(path, start_of(path, text))[0] == []


def test_a_cursor_of_a_file_that_is_gone_goes_on_with_the_oldest_event_left(path: Path) -> None:
    log = EventLog(path, lambda: 1.0)
    log.write("counted", n=7)
    assert numbers(path, "1.fffff")[0] == [7]


def test_pages_go_backwards_over_a_rotation_to_the_first_line(path: Path) -> None:
    old, log = EventLog(path.with_suffix(".old.jsonl"), lambda: 1.0), EventLog(path, lambda: 2.0)
    for n in range(6):
        (old if n < 3 else log).write("counted", n=n)
    found, before = [], None
    while True:
        page = read_page(path, 2, lambda _: True, before=before)
        found.append([event["n"] for event in page.events])
        before = page.older
        if before is None:
            break
    assert found == [[4, 5], [3], [1, 2], [0]]


def test_the_last_events_that_fit_come_newest_first_over_a_rotation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.facts.events.NEAR_BYTES", 70)
    old = EventLog(path.with_suffix(".old.jsonl"), lambda: 1.0)
    old.write("counted", n=1, client="a")
    log = EventLog(path, lambda: 2.0)
    log.write("counted", n=2, client="b")
    log.write("other", n=3, client="a")
    assert [event["n"] for event in last_events(path, EventFilter(), 10)] == [3, 2, 1]
    assert [event["n"] for event in last_events(path, EventFilter(event="counted"), 1)] == [2]
    assert [event["n"] for event in last_events(path, EventFilter(client="a"), 10)] == [3, 1]
    assert [event["n"] for event in last_events(path, EventFilter(text="OTHER"), 10)] == [3]


def test_an_event_has_the_sentence_and_the_level_of_the_log(path: Path) -> None:
    log = EventLog(path, lambda: 1.0, about={"federation": "tiny"})
    log.write("declined", client="a", round=2, attempt=1, reason="no_data")
    log.write("teacher_done", client="a", round=2, attempt=1)
    log.write("aggregate_stored", round=2, attempt=1, size=1500)
    shown = last_events(path, EventFilter(level="info"), 10)
    assert [(each["level"], each["message"]) for each in shown] == [
        ("info", "tiny: round 2: aggregate stored (1.5 kB)"),
        (
            "warning",
            f"tiny: round 2: a declined (no_data). What to do: {DECLINE_ADVICE['no_data']}",
        ),
    ]
    assert shown[1]["reason"] == "no_data"  # its fields stay
    assert len(last_events(path, EventFilter(level="warning"), 10)) == 1
    assert len(last_events(path, EventFilter(level="warning", event="teacher_done"), 10)) == 1
    assert len(last_events(path, EventFilter(text="fedcg doctor"), 10)) == 1
    assert in_words({"event": "of_another_version"})["message"] == "of another version"
