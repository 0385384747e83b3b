"""The database: what must be true together is written together, the engine's state survives a restart, and every reader gets each event once, in order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL
from sqlalchemy import update as change

from coordinator.errors import StoreError
from coordinator.rounds import records
from coordinator.rounds.engine import Phase, transition
from coordinator.rounds.signals import CameOnline, OpenAttempt, Tick
from coordinator.storage import event_store, schema
from coordinator.storage.event_store import EventFilter, coordinator_log
from coordinator.storage.store import Store
from fedcg.event_log import EventLog, read_events
from fedcg.sentences import texts
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import closing_engine
from tests.support.present import present
from tests.support.waiting import wait_until

FEDERATION = records.FederationRecord("f", "fedcg", "5" * 64, policy_of(2, 2, 2), 1.0)
KEY = ("f", RoundAttempt(1, 1))


@pytest.fixture
def store(database: Path | URL) -> Iterator[Store]:
    opened = Store(database)
    opened.add_federation(FEDERATION, records.AggregateRecord("f", 0, 0, "0" * 64, 10, "e" * 64, 1.0))
    for device in ("a", "b", "c"):
        opened.add_device(device, device * 64, 1.0)
    yield opened
    opened.close()


def update(
    client: str, outcome: Outcome = Outcome.ACCEPTED, artifact: str = "1", attempt: int = 1
) -> records.UpdateRecord:
    return records.UpdateRecord("f", 1, attempt, client, artifact * 64, 10, outcome, "", None, 2.0, 3.0)


def open_attempt(store: Store, attempt: int = 1) -> None:
    store.open_attempt("f", RoundAttempt(1, attempt), "0" * 64, frozenset("abc"), 10.0, 110.0)


@pytest.mark.usefixtures("store")
def test_every_commit_reaches_the_disk(database: Path | URL) -> None:
    settings: dict[str, object] = {"SHOW synchronous_commit": "on"}
    if isinstance(database, Path):
        settings = {"PRAGMA synchronous": 2, "PRAGMA journal_mode": "wal", "PRAGMA foreign_keys": 1}
    with closing_engine(database) as engine, engine.connect() as connection:
        assert {setting: connection.exec_driver_sql(setting).scalar_one() for setting in settings} == settings


def test_a_device_that_was_revoked_meanwhile_from_another_machine_is_not_disabled(store: Store) -> None:
    for device in "ab":
        if device == "b":
            store.register.end_membership(device, records.DeviceState.REVOKED, "stolen", 2.0)
        store.disable(device, 3.0, "repairs")
    assert [device.disabled_at for device in store.devices()] == [3.0, None, None]


def test_an_update_that_ended_keeps_its_first_end(store: Store) -> None:
    open_attempt(store)
    first = update("a")
    assert store.end_update(first) is first
    assert store.end_update(update("a", Outcome.REJECTED, artifact="2")) == first
    assert [person.state for person in store.participants(*KEY)] == [records.ParticipantState.INVITED] * 3


def test_closing_stores_the_aggregate_or_nothing(store: Store) -> None:
    open_attempt(store)
    store.close_attempt(records.AggregateRecord("f", 1, 1, "a" * 64, 10, "e" * 64, 20.0))
    closed = present(store.attempt(*KEY))
    assert (closed.state, closed.closed_at) == (records.AttemptState.CLOSED, 20.0)
    open_attempt(store, attempt=2)
    with pytest.raises(StoreError, match="already"):
        store.close_attempt(records.AggregateRecord("f", 1, 2, "b" * 64, 10, "e" * 64, 30.0))
    again = present(store.attempt("f", RoundAttempt(1, 2)))
    assert again.state is records.AttemptState.COLLECTING
    stored = present(store.aggregate("f", 1))
    assert stored.artifact == "a" * 64


def test_the_engine_state_is_rebuilt_while_collecting_and_while_distilling(store: Store) -> None:
    assert store.round_state("f").phase is Phase.WAITING
    open_attempt(store)
    store.end_update(update("a"))
    store.end_update(update("b", Outcome.REJECTED))
    store.answer(*KEY, "a", records.ParticipantState.ACCEPTED)
    store.answer(*KEY, "c", records.ParticipantState.DECLINED, "no_data")
    state = store.round_state("f")
    assert (state.phase, state.round, state.attempt, state.deadline_at) == (Phase.COLLECTING, 1, 1, 110.0)
    assert (state.participants, state.updates, state.declined) == (frozenset("abc"), frozenset("a"), frozenset("bc"))
    assert (state.online, state.accepted) == (frozenset(), frozenset("a"))
    store.start_distilling(*KEY, 50.0)
    assert store.round_state("f").phase is Phase.DISTILLING


def test_the_engine_state_is_rebuilt_between_rounds_and_at_the_end(store: Store) -> None:
    for number in (1, 2):
        store.open_attempt("f", RoundAttempt(number, 1), "0" * 64, frozenset("ab"), 10.0, 110.0)
        store.close_attempt(records.AggregateRecord("f", number, 1, str(number) * 64, 10, "e" * 64, 20.0))
        state = store.round_state("f")
        assert (state.phase, state.round) == ((Phase.WAITING, 2) if number == 1 else (Phase.FINISHED, 2))


def test_a_failed_attempt_that_does_not_count_moves_the_first_and_keeps_its_pause(store: Store) -> None:
    for attempt in (1, 2, 3):  # two would pause the federation
        open_attempt(store, attempt)
        store.fail_attempt("f", RoundAttempt(1, attempt), "nobody answered", 20.0, attempt + 1)
        state = store.round_state("f")
        assert (state.phase, state.attempt, state.first_attempt) == (Phase.WAITING, attempt + 1, attempt + 1)
    open_attempt(store, attempt=4)
    store.fail_attempt("f", RoundAttempt(1, 4), "declined", 30.0, 4)
    stored = store.round_state("f")
    state = replace(stored, opening=replace(stored.opening, retry_s=10.0))
    for client in ("a", "b"):
        state, _ = transition(state, CameOnline(client), 31.0)
    assert transition(state, Tick(), 39.9)[1] == ()
    assert isinstance(transition(state, Tick(), 40.0)[1][0], OpenAttempt)


def test_a_client_that_was_rejected_or_declined_stays_so_when_it_accepts_again(store: Store) -> None:
    open_attempt(store)
    store.answer(*KEY, "a", records.ParticipantState.DECLINED, "its classifier holds NaN")
    store.answer(*KEY, "a", records.ParticipantState.ACCEPTED)
    found = next(person for person in store.participants(*KEY) if person.client == "a")
    assert (found.state, found.reason) == (records.ParticipantState.DECLINED, "its classifier holds NaN")


def test_an_update_that_meets_the_end_of_collecting_is_merged_or_not_stored(store: Store, database: Path | URL) -> None:
    open_attempt(store)
    with ThreadPoolExecutor(1) as pool, closing_engine(database) as engine:
        with engine.begin() as ending:
            ending.execute(change(schema.attempts).values(state=records.AttemptState.DISTILLING.value))
            ended = pool.submit(store.end_update, update("a"))
            assert not wait([ended], timeout=0.3).done  # until the end of collecting is known
        assert ended.result() is None
    assert store.updates(*KEY) == []


def test_what_a_device_may_send_can_be_stored(store: Store) -> None:
    open_attempt(store)
    store.answer(*KEY, "a", records.ParticipantState.DECLINED, "no\0thing")
    assert store.participants(*KEY)[0].reason == "nothing"
    assert store.attempt("f", RoundAttempt(1 << 53, 1 << 53)) is None  # a manifest may name any round


def test_changes_of_presence_are_bounded_but_the_last_one_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.view_store.KEEP_CHANGES", 5)
    times = {"a": range(100, 200, 10), "b": (10, 20, 30), "c": (10, 60, 95)}
    for device, when in times.items():
        store.presence.note(*(records.PresenceRecord("f", device, float(at), at % 20 == 0) for at in when))
    store.presence.prune("f", 50.0, "a")
    kept = {device: [int(change.at) for change in store.presence.changes(device, 0.0)] for device in times}
    assert kept == {"a": [150, 160, 170, 180, 190], "b": [10, 20, 30], "c": [10, 60, 95]}
    store.presence.prune("f", 70.0)
    kept = {device: [int(change.at) for change in store.presence.changes(device, 0.0)] for device in times}
    assert kept == {"a": [150, 160, 170, 180, 190], "b": [30], "c": [95]}
    again = records.PresenceRecord("f", "a", 190.0, online=True, reason="the same tick")
    store.presence.note(again, records.PresenceRecord("f", "b", 200.0, online=True))
    assert (store.presence.latest("f")["a"].reason, store.presence.latest("f")["b"].at) == ("", 200.0)


EVERY = EventFilter()


@pytest.fixture
def log(tmp_path: Path, store: Store) -> EventLog:
    return coordinator_log(tmp_path / "events.jsonl", store.events)


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return [each["n"] for each in found]


def test_events_come_newest_first_and_those_before_one_on_request(store: Store, log: EventLog) -> None:
    for n, client in enumerate(("ä", "b", "ä", "b", "ä")):
        log.about(federation="tiny" if n < 3 else "other").write("counted" if n else "begun", client=client, n=n)
    events = store.events
    assert numbers(events.last(EVERY, 10)) == [4, 3, 2, 1, 0]
    newest = events.last(EVERY, 2)
    assert numbers(newest) == [4, 3]
    assert numbers(events.last(EVERY, 2, before=newest[-1]["id"])) == [2, 1]
    for wanted, fits in (
        (EventFilter(event="counted"), [4, 3, 2, 1]),
        (EventFilter(client="ä"), [4, 2, 0]),
        (EventFilter(federation="tiny", client="ä"), [2, 0]),
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
        ("warning", f"tiny: round 2: a declined (no_data). What to do: {texts().declined['no_data']}"),
    ]
    assert shown[1]["reason"] == "no_data"  # its fields stay
    assert len(store.events.last(EventFilter(level="warning"), 10)) == 1
    assert len(store.events.last(EventFilter(level="warning", event="teacher_done"), 10)) == 1
    assert len(store.events.last(EventFilter(text="fedcg doctor"), 10)) == 1
    assert store.events.last(EVERY, 1)[0]["message"] == "of another version"


def test_a_reader_goes_on_from_its_last_event_and_misses_none_of_many_writers(store: Store, log: EventLog) -> None:
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


def test_events_stay_and_ids_go_on(database: Path | URL, tmp_path: Path, store: Store, log: EventLog) -> None:
    log.write("counted", n=0)
    store.close()  # the table has it by then
    with closing(Store(database)) as again:
        assert again.events.newest() == 1
        coordinator_log(tmp_path / "events.jsonl", again.events).write("counted", n=1)
        assert [(each["id"], each["n"]) for each in again.events.last(EVERY, 10)] == [(2, 1), (1, 0)]


def test_the_table_of_events_is_bounded(store: Store, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_store, "KEEP", 3)
    for n in range(5):
        log.write("counted", n=n)
        store.events.flush()
    assert numbers(store.events.last(EVERY, 10)) == [4, 3, 2]
    assert numbers(store.events.after(1, 10)) == [2, 3, 4]  # of a reader that was away for longer


def test_a_database_that_takes_no_event_stops_nobody_and_gets_them_later(
    database: Path | URL, tmp_path: Path, store: Store, log: EventLog
) -> None:
    def rename(before: str, after: str) -> None:
        with closing_engine(database) as engine, engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}")

    rename("events", "elsewhere")
    log.write("counted", n=0)
    store.events.flush()
    assert [each["n"] for each in read_events(tmp_path / "events.jsonl")] == [0]
    rename("elsewhere", "events")
    log.write("counted", n=1)
    assert numbers(store.events.last(EVERY, 10)) == [1, 0]
