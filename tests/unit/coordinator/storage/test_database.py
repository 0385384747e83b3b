"""A database that lost commits is noticed, and one of an earlier version is brought to this one with all that it holds."""

import hashlib
import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Column, MetaData, String, inspect, text

from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.errors import StoreError
from coordinator.paths import Home
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import (
    AggregateRecord,
    CertificateRecord,
    DeviceState,
    FederationRecord,
    TokenRecord,
    UpdateRecord,
)
from coordinator.storage import database as database_module
from coordinator.storage import migrations
from coordinator.storage.backup import read_backup, write_backup
from coordinator.storage.database import PASSWORD_VARIABLE, checkpoint, make_engine, open_database
from coordinator.storage.migrations import SCHEMA_VERSION
from coordinator.storage.schema import metadata
from coordinator.storage.store import Store
from fedcg import sealing
from fedcg.config_file import set_values
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.engine import policy_of
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


def test_a_restored_coordinator_has_its_own_mark(killed: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_commits_lost_in_postgresql_are_noticed(home: Home, postgres: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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


KEY = ("casting", RoundAttempt(1, 1))


def columns(path: Path) -> set[str]:
    """Of the table of devices."""
    engine = make_engine(path)
    found = {column["name"] for column in inspect(engine).get_columns("devices")}
    engine.dispose()
    return found


def differences(database: Path | URL) -> list[object]:
    """What an automatic migration would change to bring the database to the tables that the queries use."""
    engine = open_database(database)
    with engine.connect() as connection:
        # Alembic takes a default of '' in SQLite for a change; PostgreSQL's comparison covers the defaults of both.
        options = {"compare_type": True, "compare_server_default": connection.dialect.name != "sqlite"}
        found: list[object] = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    engine.dispose()
    return found


def test_a_column_without_its_revision_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = MetaData()
    for table in metadata.sorted_tables:
        table.to_metadata(changed)
    changed.tables["devices"].append_column(Column("owner", String))
    monkeypatch.setitem(globals(), "metadata", changed)
    assert [change[0] for change in cast("list[tuple[str, ...]]", differences(tmp_path / "new.sqlite"))] == [
        "add_column"
    ]


def test_there_is_a_revision_for_each_version() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    found = [script.revision for script in reversed(list(scripts.walk_revisions()))]
    assert found == [str(number) for number in range(1, SCHEMA_VERSION + 1)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_new_database_has_the_tables_that_are_used(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    is_file = kind == "sqlite"
    database = tmp_path / "new.sqlite" if is_file else request.getfixturevalue("postgres").make_database()
    for _ in range(2):  # made, then opened
        assert differences(database) == []


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A database of this version: an open round 2 after a closed round 1, and a device that was revoked."""
    path = tmp_path / "database.sqlite"
    with closing(Store(path)) as store:
        store.next_epoch()
        federation = FederationRecord("casting", "fedcg", "5" * 64, policy_of(3, 2), 1.0)
        store.add_federation(federation, AggregateRecord("casting", 0, 0, "0" * 64, 10, "e" * 64, 1.0))
        for device in ("line-1", "line-2"):
            store.add_device(device, device * 8, 2.0, CertificateRecord(device, device, 2.0, 9e9, None, "PEM"))
        store.register.add_token(
            TokenRecord("0" * 16, "f" * 64, "line-3", replaces=False, created_at=2.0, expires_at=9e9)
        )
        store.register.end_membership("line-2", DeviceState.REVOKED, "stolen", 50.0)
        store.open_attempt(*KEY, "0" * 64, frozenset({"line-1", "line-2"}), 10.0, 110.0)
        for device in ("line-1", "line-2"):
            store.end_update(UpdateRecord("casting", 1, 1, device, device, 9, Outcome.ACCEPTED, "", None, 11.0, 12.0))
        store.weigh(*KEY, {"line-1": 12, "line-2": 9})
        store.close_attempt(AggregateRecord("casting", 1, 1, "a" * 64, 900, "b" * 64, 30.0))
        store.open_attempt("casting", RoundAttempt(2, 1), "a" * 64, frozenset({"line-1"}), 31.0, 131.0)
        store.masked_sums.keep("casting", RoundAttempt(2, 1), '{"phase":"keys"}')
    return path


@pytest.fixture
def next_version(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A program of a made-up next version, which gives devices an owner."""
    scripts, made_up = tmp_path / "migrations", SCHEMA_VERSION + 1
    shutil.copytree(migrations.SCRIPTS, scripts)
    (scripts / "versions" / f"version_{made_up}.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision, down_revision = '{made_up}', '{SCHEMA_VERSION}'\n"
        "def upgrade():\n    op.add_column('devices', sa.Column('owner', sa.String))\n"
    )
    monkeypatch.setattr(migrations, "SCRIPTS", scripts)
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", made_up)
    return made_up


def check_content(path: Path) -> None:
    with closing(Store(path)) as store:
        assert (store.epoch(), store.federation("casting").policy.rounds) == (1, 3)
        assert [device.state for device in store.devices()] == [DeviceState.ENROLLED, DeviceState.REVOKED]
        assert len(store.register.tokens()) == len(store.register.certificates("line-1")) == 1
        ended = [(update.client, update.outcome, update.weight) for update in store.updates(*KEY)]
        assert ended == [("line-1", Outcome.ACCEPTED, 12), ("line-2", Outcome.ACCEPTED, 9)]
        assert [aggregate.round for aggregate in store.aggregates("casting")] == [0, 1]
        assert store.masked_sums.of("casting", RoundAttempt(2, 1)) == '{"phase":"keys"}'
        state = store.round_state("casting")
        assert (state.phase, state.round, state.participants) == (Phase.COLLECTING, 2, frozenset({"line-1"}))


@pytest.mark.usefixtures("next_version")
def test_a_database_of_an_earlier_version_is_brought_up_with_all_that_it_holds(filled: Path) -> None:
    for _ in range(2):  # brought up, then as it is
        check_content(filled)
    assert "owner" in columns(filled)


@pytest.mark.usefixtures("next_version")
def test_a_migration_that_fails_leaves_the_database_as_it_was(filled: Path) -> None:
    connection = sqlite3.connect(filled)
    connection.execute("ALTER TABLE devices ADD COLUMN owner")  # the step meets a column that should not be there
    connection.commit()
    connection.close()
    before = filled.read_bytes()
    with pytest.raises(StoreError, match=r"database\.sqlite could not be brought from version 1 to"):
        Store(filled)
    assert filled.read_bytes() == before


def test_a_database_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "database.sqlite"
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE alembic_version AS SELECT '{SCHEMA_VERSION + 1}' AS version_num")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match=f"up to version {SCHEMA_VERSION}"):
        Store(path)


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "database.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE alembic_version AS SELECT '1b2c3d' AS version_num")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="of another program"):
        Store(path)


def test_a_postgresql_of_an_earlier_version_is_brought_up_whole(postgres: Cluster, next_version: int) -> None:
    database = postgres.make_database()
    engine = make_engine(database)
    with engine.begin() as connection:
        migrations.upgrade(connection, next_version - 1)
        connection.execute(text("INSERT INTO leases VALUES (1, 7)"))
    store = Store(database)
    assert store.epoch() == 7
    store.close()
    assert "owner" in {column["name"] for column in inspect(engine).get_columns("devices")}
    engine.dispose()


def test_a_migration_that_fails_leaves_postgresql_as_it_was(postgres: Cluster) -> None:
    database = postgres.make_database()
    engine = make_engine(database)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE api_tokens (x INTEGER)"))
    with pytest.raises(StoreError, match=r"test_\w+ could not be brought from version 0 to"):
        open_database(database)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["api_tokens"]
    engine.dispose()


def test_a_postgresql_of_a_newer_program_is_refused_without_its_password(postgres: Cluster) -> None:
    database = postgres.make_database()
    open_database(database).dispose()
    engine = make_engine(database)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :newer"), {"newer": str(SCHEMA_VERSION + 1)})
    engine.dispose()
    with pytest.raises(StoreError, match=f"up to version {SCHEMA_VERSION}") as refused:
        open_database(database)
    assert PASSWORD not in str(refused.value)
