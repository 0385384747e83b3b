"""Events in the database: every reader gets each one once, in order, with the sentence and the level of the log."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage import event_store
from coordinator.storage.event_store import EventFilter, coordinator_log
from coordinator.storage.store import Store
from fedcg.event_log import EventLog, read_events
from fedcg.sentences import DECLINE_ADVICE
from tests.support.postgres import Cluster
from tests.support.waiting import wait_until

EVERY = EventFilter()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "database.sqlite")
    yield made
    made.close()


@pytest.fixture
def log(tmp_path: Path, store: Store) -> EventLog:
    return coordinator_log(tmp_path / "events.jsonl", store.events)


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return [each["n"] for each in found]


def test_the_last_events_that_fit_come_newest_first_and_those_before_one_on_request(
    store: Store, log: EventLog
) -> None:
    for n, client in enumerate(("a", "b", "a", "b", "a")):
        log.about(federation="tiny" if n < 3 else "other").write("counted" if n else "begun", client=client, n=n)
    events = store.events
    assert numbers(events.last(EVERY, 10)) == [4, 3, 2, 1, 0]
    newest = events.last(EVERY, 2)
    assert numbers(newest) == [4, 3]
    assert numbers(events.last(EVERY, 2, before=newest[-1]["id"])) == [2, 1]
    for wanted, fits in (
        (EventFilter(event="counted"), [4, 3, 2, 1]),
        (EventFilter(client="a"), [4, 2, 0]),
        (EventFilter(federation="tiny", client="a"), [2, 0]),
        (EventFilter(text="BEGUN"), [0]),
        (EventFilter(text="%"), []),
        (EventFilter(level="warning"), []),
    ):
        assert numbers(events.last(wanted, 10)) == fits, wanted


def test_an_event_has_the_sentence_and_the_level_of_the_log(store: Store, log: EventLog) -> None:
    log = log.about(federation="tiny")
    log.write("declined", client="a", round=2, attempt=1, reason="no_data")
    log.write("teacher_done", client="a", round=2, attempt=1)
    log.write("aggregate_stored", round=2, attempt=1, size=1500)
    log.write("of_another_version")
    shown = store.events.last(EventFilter(level="info"), 10)
    assert [(each["level"], each["message"]) for each in shown] == [
        ("info", "tiny: round 2: aggregate stored (1.5 kB)"),
        ("warning", f"tiny: round 2: a declined (no_data). What to do: {DECLINE_ADVICE['no_data']}"),
    ]
    assert shown[1]["reason"] == "no_data"  # its fields stay
    assert len(store.events.last(EventFilter(level="warning"), 10)) == 1
    assert len(store.events.last(EventFilter(level="warning", event="teacher_done"), 10)) == 1
    assert len(store.events.last(EventFilter(text="fedcg doctor"), 10)) == 1
    assert store.events.last(EVERY, 1)[0]["message"] == "of another version"


def test_a_reader_goes_on_from_the_last_event_that_it_has_and_misses_none_of_many_writers(
    store: Store, log: EventLog
) -> None:
    def write(writer: int) -> None:
        for n in range(50):
            log.write("counted", n=100 * writer + n)

    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(4) as writers:
        done = writers.map(write, range(4))

        def is_read() -> bool:
            if found_now := store.events.after(found[-1]["id"] if found else 0, 7):
                found.extend(found_now)
            return len(found) == 200

        wait_until(is_read, "every event is read, without another read that brings them into the table")
        list(done)
    assert sorted(numbers(found)) == sorted(100 * writer + n for writer in range(4) for n in range(50))
    assert [each["id"] for each in found] == list(range(1, 201))
    assert store.events.newest() == 200


def test_events_of_an_earlier_process_stay_and_ids_go_on(tmp_path: Path, store: Store, log: EventLog) -> None:
    log.write("counted", n=0)
    store.close()  # the table has it by then
    again = Store(tmp_path / "database.sqlite")
    assert again.events.newest() == 1
    coordinator_log(tmp_path / "events.jsonl", again.events).write("counted", n=1)
    assert [(each["id"], each["n"]) for each in again.events.last(EVERY, 10)] == [(2, 1), (1, 0)]
    again.close()


def test_postgresql_keeps_events_alike(tmp_path: Path, postgres: Cluster) -> None:
    with closing(Store(postgres.make_database())) as store:
        log = coordinator_log(tmp_path / "events.jsonl", store.events)
        for n in range(3):
            log.write("counted", client="ä" if n else "b", n=n)
        assert numbers(store.events.last(EventFilter(client="ä", text="COUNTED"), 10)) == [2, 1]
        assert numbers(store.events.last(EventFilter(level="debug"), 10, before=3)) == [1, 0]
        assert [each["id"] for each in store.events.after(1, 10)] == [2, 3]


def test_the_table_keeps_a_bounded_number_of_events(
    store: Store, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_store, "KEEP", 3)
    for n in range(5):
        log.write("counted", n=n)
        store.events.flush()
    assert numbers(store.events.last(EVERY, 10)) == [4, 3, 2]
    assert numbers(store.events.after(1, 10)) == [2, 3, 4]  # of a reader that was away for longer


def test_a_database_that_takes_no_event_stops_nobody_and_gets_them_later(
    tmp_path: Path, store: Store, log: EventLog
) -> None:
    def change(statement: str) -> None:
        with closing(sqlite3.connect(tmp_path / "database.sqlite")) as connection:
            connection.execute(statement)

    change("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(FAIL, 'the disk is full'); END")
    log.write("counted", n=0)
    assert store.events.last(EVERY, 10) == []
    assert [each["n"] for each in read_events(tmp_path / "events.jsonl")] == [0]
    change("DROP TRIGGER full")
    log.write("counted", n=1)
    assert numbers(store.events.last(EVERY, 10)) == [1, 0]
