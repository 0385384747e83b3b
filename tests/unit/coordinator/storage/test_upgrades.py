"""A database of an earlier version is brought to this one with all that it holds; a made-up next version stands for this one."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Column, MetaData, String, inspect, text

from coordinator.errors import StoreError
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
from coordinator.storage.database import make_engine, open_database
from coordinator.storage.migrations import SCHEMA_VERSION
from coordinator.storage.schema import metadata
from coordinator.storage.store import Store
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.coordinator.engine import policy_of
from tests.support.postgres import PASSWORD, Cluster

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
def test_a_new_database_has_the_tables_that_the_queries_use(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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


def test_a_postgresql_of_an_earlier_version_is_brought_up_with_all_that_it_holds(
    postgres: Cluster, next_version: int
) -> None:
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
