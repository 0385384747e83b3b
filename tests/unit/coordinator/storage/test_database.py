"""A database that lost commits is noticed, one of an earlier version is brought to this one, and one coordinator at a time writes it."""

import hashlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, inspect, text

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, StorageSettings
from coordinator.errors import HomeError, StoreError
from coordinator.paths import Home
from coordinator.rounds import records
from coordinator.rounds.engine import Phase
from coordinator.storage import database as database_module
from coordinator.storage import locks, migrations
from coordinator.storage.database import PASSWORD_VARIABLE, checkpoint, make_engine, open_database
from coordinator.storage.locks import changing_members, sole_writer
from coordinator.storage.migrations import SCHEMA_VERSION
from coordinator.storage.schema import metadata
from coordinator.storage.store import Store
from fedcg.config_file import set_values
from fedcg.errors import ALREADY_RUNNING
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.commands import fails, succeeds
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import add_federation, call, closing_engine
from tests.support.machines import ADDRESS, needs_machines, second_machine
from tests.support.postgres import PASSWORD, Cluster, running_cluster
from tests.support.waiting import free_port

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
    store.close_attempt(records.AggregateRecord("f", number, 1, file_id(number), 5, file_id(0), number + 5.0))


@pytest.fixture
def killed(home: Home) -> Iterator[Home]:
    """The home of a coordinator that was killed after two closed rounds, with a revocation and an open round in the log."""
    with closing(Store.of(home)) as store:
        store.next_epoch()
        for number in (1, 2):
            open_round(store, number)
            close_round(store, number)
        store.register.end_membership("c", records.DeviceState.REVOKED, "stolen", time.time())
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
        revoked = [device for device in store.devices() if device.state is records.DeviceState.REVOKED]
        return len(store.aggregates("f")), len(store.attempts("f")), len(revoked)


def test_what_was_committed_before_a_kill_is_taken_up_and_the_mark_may_lag_behind(killed: Home) -> None:
    marked = killed.high_water.read_bytes()
    with closing(Store.of(killed)) as store:
        assert store.epoch() > 0
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
        assert "revoked certificates (0 now, 1 before)" in fails(1, *words, "--dir", killed.root), words
    assert not (tmp_path / "backup").exists()


def test_an_accepted_loss_goes_on_with_an_epoch_that_no_device_has_seen(killed: Home) -> None:
    log_of(killed).write_bytes(b"")
    Store.of(killed, accepts_loss=True).close()
    with closing(Store.of(killed)) as store:
        assert store.next_epoch() > 1_000_000
        open_round(store, 3)
    Store.of(killed).close()


def test_copies_of_a_home_take_other_and_each_start_a_higher_epoch(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([4, 7, 2, 63])
    monkeypatch.setattr("coordinator.storage.store.secrets.randbelow", lambda most: next(steps) % most)

    def started(place: Home) -> int:
        with closing(Store.of(place)) as store:
            return store.next_epoch()

    first, copy = started(home), Home(home.root.parent / "older")
    shutil.copytree(home.root, copy.root)
    assert (first, started(home), started(copy), started(home)) == (6, 14, 9, 78)


def test_a_damaged_database_file_and_a_damaged_or_missing_mark_are_refused_by_name(killed: Home) -> None:
    with closing(sqlite3.connect(killed.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole, mark = killed.database.read_bytes(), killed.high_water.read_bytes()
    for start, end in ((0, 16), (100, 108), (4096, 4104)):  # the file's magic, the schema's page, a table's
        killed.database.write_bytes(whole[:start] + bytes(end - start) + whole[end:])
        output = fails(1, "coordinator", "run", "--dir", killed.root)
        assert f"{killed.database} is damaged" in output
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


def test_commits_lost_in_postgresql_are_noticed(home: Home, postgres: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    url = postgres.make_database()
    text = home.config_file.read_text()
    place = url.set(password=None).render_as_string()
    home.config_file.write_text(set_values(text, {("storage", "database"): place}))
    home.high_water.unlink()
    with closing(Store.of(home)) as store:
        add_federation(home, "g", ("x",))
        store.register.end_membership("x", records.DeviceState.REVOKED, "stolen", time.time())
    engine = make_engine(url)
    checkpoint(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE certificates SET revoked_at = NULL")
    engine.dispose()
    with pytest.raises(StoreError, match="revoked certificates"):
        Store.of(home)
    home.high_water.unlink()
    Store.of(home).close()


KEY = ("casting", RoundAttempt(1, 1))


def test_there_is_a_revision_for_each_version() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    found = [script.revision for script in reversed(list(scripts.walk_revisions()))]
    assert found == [str(number) for number in range(1, SCHEMA_VERSION + 1)]


def test_a_new_database_has_the_tables_that_are_used(database: Path | URL) -> None:
    for _ in range(2):  # made, then opened
        engine = open_database(database)
        with engine.connect() as connection:
            # Alembic takes a default of '' in SQLite for a change; PostgreSQL's comparison covers the defaults of both.
            options = {"compare_type": True, "compare_server_default": connection.dialect.name != "sqlite"}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
        engine.dispose()


@pytest.fixture
def filled(database: Path | URL) -> Path | URL:
    """A database of this version: an open round 2 after a closed round 1, and a device that was revoked."""
    with closing(Store(database)) as store:
        store.next_epoch()
        federation = records.FederationRecord("casting", "fedcg", "5" * 64, policy_of(3, 2), 1.0)
        store.add_federation(federation, records.AggregateRecord("casting", 0, 0, "0" * 64, 10, "e" * 64, 1.0))
        for device in ("line-1", "line-2"):
            store.add_device(device, device * 8, 2.0, records.CertificateRecord(device, device, 2.0, 9e9, None, "PEM"))
        store.register.add_tokens(
            [records.TokenRecord("0" * 16, "f" * 64, "line-3", replaces=False, created_at=2.0, expires_at=9e9)]
        )
        store.register.end_membership("line-2", records.DeviceState.REVOKED, "stolen", 50.0)
        store.open_attempt(*KEY, "0" * 64, frozenset({"line-1", "line-2"}), 10.0, 110.0)
        for device in ("line-1", "line-2"):
            store.end_update(
                records.UpdateRecord("casting", 1, 1, device, device, 9, Outcome.ACCEPTED, "", None, 11.0, 12.0)
            )
        store.weigh(*KEY, {"line-1": 12, "line-2": 9})
        store.close_attempt(records.AggregateRecord("casting", 1, 1, "a" * 64, 900, "b" * 64, 30.0))
        store.open_attempt("casting", RoundAttempt(2, 1), "a" * 64, frozenset({"line-1"}), 31.0, 131.0)
        store.sealed_sums.keep("casting", RoundAttempt(2, 1), '{"phase":"keys"}')
    return database


@pytest.fixture
def next_version(filled: Path | URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of a made-up next version, which gives devices an owner."""
    scripts, made_up = tmp_path / "migrations", SCHEMA_VERSION + 1
    shutil.copytree(migrations.SCRIPTS, scripts)
    (scripts / "versions" / f"version_{made_up}.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision, down_revision = '{made_up}', '{SCHEMA_VERSION}'\n"
        "def upgrade():\n    op.add_column('devices', sa.Column('owner', sa.String))\n"
    )
    monkeypatch.setattr(migrations, "SCRIPTS", scripts)
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", made_up)


def check_content(database: Path | URL) -> None:
    with closing(Store(database)) as store:
        assert (store.epoch() > 0, store.federation("casting").policy.rounds) == (True, 3)
        assert [device.state for device in store.devices()] == [
            records.DeviceState.ENROLLED,
            records.DeviceState.REVOKED,
        ]
        assert len(store.register.tokens()) == len(store.register.certificates("line-1")) == 1
        ended = [(update.client, update.outcome, update.weight) for update in store.updates(*KEY)]
        assert ended == [("line-1", Outcome.ACCEPTED, 12), ("line-2", Outcome.ACCEPTED, 9)]
        assert [aggregate.round for aggregate in store.aggregates("casting")] == [0, 1]
        assert store.sealed_sums.of("casting", RoundAttempt(2, 1)) == '{"phase":"keys"}'
        state = store.round_state("casting")
        assert (state.phase, state.round, state.participants) == (Phase.COLLECTING, 2, frozenset({"line-1"}))


@pytest.mark.usefixtures("next_version")
def test_a_database_of_an_earlier_version_is_brought_up_with_all_that_it_holds(filled: Path | URL) -> None:
    for _ in range(2):  # brought up, then as it is
        check_content(filled)
    with closing_engine(filled) as engine:
        assert "owner" in {column["name"] for column in inspect(engine).get_columns("devices")}


@pytest.mark.usefixtures("next_version")
def test_a_failed_migration_leaves_the_database_as_it_was(filled: Path | URL, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing_engine(filled) as engine, engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE devices ADD COLUMN owner VARCHAR")  # the step meets a column
    before = filled.read_bytes() if isinstance(filled, Path) else b""
    with pytest.raises(StoreError, match=r"(database\.sqlite|test_\w+) could not be upgraded from version 1 to"):
        Store(filled)
    assert before == (filled.read_bytes() if isinstance(filled, Path) else b"")
    monkeypatch.undo()
    check_content(filled)  # by the program of its version


@pytest.mark.parametrize(
    ("version", "why"), [(str(SCHEMA_VERSION + 1), f"up to version {SCHEMA_VERSION}"), ("1b2c3d", "of another program")]
)
def test_a_database_of_a_newer_or_another_program_is_refused(database: Path | URL, version: str, why: str) -> None:
    open_database(database).dispose()
    with closing_engine(database) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
    with pytest.raises(StoreError, match=why) as refused:
        open_database(database)
    assert PASSWORD not in str(refused.value)


HOLD = """
import pathlib, sys
from coordinator.paths import Home
from coordinator.storage import locks
with getattr(locks, sys.argv[2])(Home(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_ROW = """
import pathlib, sys
from sqlalchemy import select
from coordinator.paths import Home
from coordinator.storage import schema
from coordinator.storage.database import database_of, open_database
with open_database(database_of(Home(pathlib.Path(sys.argv[1])))).begin() as connection:
    connection.execute(select(schema.leases).with_for_update()).one()
    print("held", flush=True)
    sys.stdin.read()
"""


def home_on(database: URL, root: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    storage = StorageSettings(database=database.set(password=None).render_as_string())
    broker, api = BrokerSettings(port=free_port()), ApiSettings(port=free_port())
    return create_home(root, CoordinatorConfig(broker=broker, api=api, storage=storage))


@pytest.fixture
def homes(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Home, Home]:
    """The directories of two machines on one database."""
    database = postgres.make_database()
    return home_on(database, tmp_path / "first", monkeypatch), home_on(database, tmp_path / "second", monkeypatch)


@contextmanager
def holding(
    home: Home, lock: str = "sole_writer", script: str = HOLD, where: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock until its input ends; killed at the end of the block."""
    words, pipe = [*where, sys.executable, "-c", script, str(home.root), lock], subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_coordinator_is_refused_until_the_first_is_killed(homes: tuple[Home, Home]) -> None:
    first, second = homes
    with holding(first):
        words = (sys.executable, "-m", "fedcg", "coordinator", "run", "--dir", second.root)
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert refused.returncode == ALREADY_RUNNING
        assert "is using postgresql+psycopg://postgres:***@127.0.0.1" in " ".join(refused.stderr.split())
        assert PASSWORD not in refused.stdout + refused.stderr
    with sole_writer(second):
        pass


@pytest.mark.slow
def test_a_coordinator_that_hangs_loses_its_lock_and_ends_when_it_wakes(homes: tuple[Home, Home]) -> None:
    first, second = homes
    with holding(first) as process:
        process.send_signal(signal.SIGSTOP)
        with sole_writer(second):
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 1


@needs_machines
@pytest.mark.slow
def test_locks_of_a_vanished_machine_are_free_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with second_machine() as machine, running_cluster(ADDRESS) as cluster:
        database = cluster.make_database()
        first, second = (home_on(database, tmp_path / name, monkeypatch) for name in ("first", "second"))
        with closing(Store.of(second)) as store:
            epoch = store.next_epoch()
            with (
                holding(first, where=machine.enter),
                holding(first, "changing_members", where=machine.enter),
                holding(first, script=HOLD_ROW, where=machine.enter),
            ):
                machine.vanish()
                with sole_writer(second), changing_members(second):
                    assert store.next_epoch() > epoch


def test_a_hanging_change_of_members_is_named(homes: tuple[Home, Home], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = homes
    monkeypatch.setattr(locks, "MEMBERS_WAIT_S", 1)
    with holding(first, "changing_members"):
        output = fails(ALREADY_RUNNING, "token", "create", "--dir", second.root)
    assert "(from 127.0.0.1, since 20" in output
    assert "is changing the devices or federations of" in output


def test_a_coordinator_without_a_lock_ends(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = postgres.make_database()
    with holding(home_on(database, tmp_path / "home", monkeypatch)) as process:
        postgres.end_sessions(database)
        assert process.wait(20) == 1
        _, errors = process.communicate()
        assert "is lost, so the coordinator stops" in errors


def test_another_database_is_not_locked(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = home_on(postgres.make_database(), tmp_path / "one", monkeypatch)
    other = home_on(postgres.make_database(), tmp_path / "other", monkeypatch)
    lost = threading.Event()
    for _ in range(2):
        with sole_writer(one, lost.set), sole_writer(other, lost.set):
            pass
    assert not lost.is_set()


def test_a_wrong_password_is_never_shown(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_on(postgres.make_database(), tmp_path / "home", monkeypatch)
    monkeypatch.setenv(PASSWORD_VARIABLE, "a-wrong-one")
    code, output = call("federation", "show", "--dir", home.root)
    assert code == 1
    assert "password authentication failed" in output
    assert "a-wrong-one" not in output


def test_the_password_may_be_in_a_file(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_on(postgres.make_database(), tmp_path / "home", monkeypatch)
    config = home.config()
    monkeypatch.delenv(PASSWORD_VARIABLE)
    (home.root / "database.password").write_text(f"{PASSWORD}\n")
    text = home.config_file.read_text().replace(
        "[storage]\n", '[storage]\ndatabase_password_file = "database.password"\n'
    )
    home.config_file.write_text(text)
    assert home.config().storage == config.storage.model_copy(update={"database_password_file": "database.password"})
    succeeds("device", "list", "--dir", home.root)


def test_a_directory_of_sqlite_has_one_coordinator(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig())
    with holding(home) as process, pytest.raises(HomeError, match=f"process {process.pid}"), sole_writer(home):
        pass
