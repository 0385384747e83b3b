"""A database that lost commits is noticed: a coordinator does not start on it, names what is missing, and says how to go on."""

import hashlib
import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.errors import StoreError
from coordinator.paths import Home
from coordinator.rounds.records import AggregateRecord, DeviceState
from coordinator.storage.backup import read_backup, write_backup
from coordinator.storage.database import PASSWORD_VARIABLE, checkpoint, make_engine
from coordinator.storage.store import Store
from fedcg import sealing
from fedcg.config_file import set_values
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator.homes import add_federation, call
from tests.support.postgres import PASSWORD, Cluster

RNG = random.Random(5)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = create_home(tmp_path / "home", CoordinatorConfig())
    add_federation(made, "f", ("a", "b", "c"))
    return made


def file_id(number: int) -> str:
    """The artifact that is this number: the aggregate of a round; 0 for the state of the server."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def open_round(store: Store, number: int) -> None:
    store.open_attempt("f", RoundAttempt(number, 1), "0" * 64, frozenset("ab"), float(number), number + 9.0)


def close_round(store: Store, number: int) -> None:
    store.close_attempt(AggregateRecord("f", number, 1, file_id(number), 5, file_id(0), number + 5.0))


@pytest.fixture
def killed(home: Home) -> Iterator[Home]:
    """The home of a coordinator that was killed after two closed rounds, with a revocation and an open round in the log."""
    with closing(Store.of(home)) as store:
        store.next_epoch()
        for number in (1, 2):
            open_round(store, number)
            close_round(store, number)
        store.register.end_membership("c", DeviceState.REVOKED, "stolen", time.time())
        open_round(store, 3)
        shutil.copytree(home.root, home.root.parent / "killed")
        yield Home(home.root.parent / "killed")


def log_of(home: Home) -> Path:
    return home.database.with_name("database.sqlite-wal")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << RNG.randrange(8)
    path.write_bytes(data)


def state(home: Home) -> tuple[int, ...]:
    """Aggregates, attempts and revoked devices; opens the database without a look at the mark."""
    with closing(Store(home.database)) as store:
        revoked = [device for device in store.devices() if device.state is DeviceState.REVOKED]
        return len(store.aggregates("f")), len(store.attempts("f")), len(revoked)


def test_what_was_committed_before_a_kill_is_taken_up_and_the_mark_may_lag_behind(killed: Home) -> None:
    marked = killed.high_water.read_bytes()
    with closing(Store.of(killed)) as store:
        assert store.epoch() == 1
        close_round(store, 3)
    assert killed.high_water.read_bytes() != marked
    killed.high_water.write_bytes(marked)  # as after a kill between the commit and the mark
    Store.of(killed).close()
    assert killed.high_water.read_bytes() == marked


def test_a_flipped_bit_in_the_log_is_noticed_wherever_it_costs_a_commit(killed: Home) -> None:
    whole = log_of(killed).read_bytes()
    assert whole, "what came after the last closed round is in the log"
    places = [*RNG.sample(range(len(whole)), 20), 10, len(whole) // 2]
    refused: list[str] = []
    copy = Home(killed.root.parent / "copy")
    for at in places:
        shutil.copytree(killed.root, copy.root)
        flip(log_of(copy), at)
        try:
            Store.of(copy).close()
            assert state(copy) == (3, 3, 1), f"byte {at}"
        except StoreError as error:
            refused.append(str(error))
        shutil.rmtree(copy.root)
    assert len(refused) > len(places) // 2
    for message in refused:
        assert "attempts of f (2 now, 3 before)" in message
        assert f"fedcg coordinator run --dir {copy.root} --accept-loss" in message


def test_closed_rounds_are_in_the_database_file_and_survive_the_loss_of_the_whole_log(killed: Home) -> None:
    log_of(killed).write_bytes(b"")
    with pytest.raises(
        StoreError,
        match=r"attempts of f \(2 now, 3 before\), revoked certificates \(0 now, 1 before\)\. Restore a backup",
    ):
        Store.of(killed)
    assert state(killed) == (3, 2, 0)


def test_every_door_refuses_a_database_that_lost_commits_and_nothing_is_written(killed: Home, tmp_path: Path) -> None:
    log_of(killed).write_bytes(b"")
    (tmp_path / "words").write_text("correct horse battery")
    for words in (
        ("coordinator", "run"),
        ("coordinator", "status"),
        ("device", "list"),
        ("token", "create"),
        ("broker", "run"),
        ("coordinator", "backup", "--out", tmp_path / "backup", "--passphrase-file", tmp_path / "words"),
    ):
        code, output = call(*words, "--dir", killed.root)
        assert (code, "revoked certificates (0 now, 1 before)" in output) == (1, True), (words, output)
    assert not (tmp_path / "backup").exists()


def test_an_accepted_loss_goes_on_with_an_epoch_that_no_device_has_seen(killed: Home) -> None:
    log_of(killed).write_bytes(b"")
    Store.of(killed, accepts_loss=True).close()
    with closing(Store.of(killed)) as store:
        assert store.next_epoch() > 1_000_000
        open_round(store, 3)
    Store.of(killed).close()


def test_a_damaged_database_file_and_a_damaged_or_missing_mark_are_refused_by_name(killed: Home) -> None:
    with closing(sqlite3.connect(killed.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole, mark = killed.database.read_bytes(), killed.high_water.read_bytes()
    for start, end in ((0, 16), (100, 108), (4096, 4104)):  # the file's magic, the schema's page, a table's
        killed.database.write_bytes(whole[:start] + bytes(end - start) + whole[end:])
        code, output = call("coordinator", "run", "--dir", killed.root)
        assert (code, f"{killed.database} is damaged" in output) == (1, True), output
        assert "fedcg coordinator restore FILE --dir NEW" in output
    killed.database.write_bytes(whole)
    flip(killed.high_water, 20)
    with pytest.raises(StoreError, match=f"{killed.high_water} is damaged, or signed with another secret"):
        Store.of(killed)
    killed.high_water.unlink()
    with pytest.raises(StoreError, match=f"{killed.high_water} is missing"):
        Store.of(killed)
    Store.of(killed, accepts_loss=True).close()
    assert killed.high_water.exists()
    assert killed.high_water.read_bytes() != mark


def test_a_restored_coordinator_has_a_mark_of_its_own(
    killed: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SCRYPT_N", 1 << 10)
    for number in range(3):
        (killed.artifacts / file_id(number)).write_text(str(number))
    write_backup(killed, tmp_path / "backup", "correct horse battery")
    new = Home(tmp_path / "new")
    read_backup(tmp_path / "backup", new, "correct horse battery", lambda _: None)
    with closing(Store.of(new)) as store:
        assert store.epoch() > 1_000_000
    with closing(sqlite3.connect(new.database)) as connection:
        connection.execute("DELETE FROM attempts WHERE round = 3")
        connection.commit()
    with pytest.raises(StoreError, match="attempts of f"):
        Store.of(new)


def test_a_database_of_postgresql_that_lost_commits_is_noticed_and_another_machine_begins_without_a_mark(
    home: Home, postgres: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    url = postgres.make_database()
    text = home.config_file.read_text()
    place = url.set(password=None).render_as_string()
    home.config_file.write_text(set_values(text, {("storage", "database"): place}))
    home.high_water.unlink()
    with closing(Store.of(home)) as store:
        add_federation(home, "g", ("x",))
        store.register.end_membership("x", DeviceState.REVOKED, "stolen", time.time())
    engine = make_engine(url)
    checkpoint(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE certificates SET revoked_at = NULL")
    engine.dispose()
    with pytest.raises(StoreError, match="revoked certificates"):
        Store.of(home)
    home.high_water.unlink()
    Store.of(home).close()
