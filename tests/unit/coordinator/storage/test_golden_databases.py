"""Databases as each version of the program wrote them (dumps in tests/golden/databases) are brought to this version, with all they hold."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Column, MetaData, String, inspect, text

from coordinator.errors import StoreError
from coordinator.rounds.records import DeviceState
from coordinator.rounds.round_engine import Phase
from coordinator.storage import database as database_module
from coordinator.storage import migrations
from coordinator.storage.database import make_engine, open_database
from coordinator.storage.migrations import SCHEMA_VERSION
from coordinator.storage.schema import metadata
from coordinator.storage.store import Store
from fedcg.wire.messages.messages import Outcome, RoundAttempt
from tests.support.postgres import PASSWORD, Cluster

GOLDEN = Path(__file__).parents[3] / "golden" / "databases"
VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))


def restore(version: int, folder: Path) -> Path:
    path = folder / "database.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript((GOLDEN / f"version-{version}.sql").read_text())
    connection.close()
    return path


def columns(path: Path) -> dict[str, dict[str, tuple[object, ...]]]:
    """Type, NOT NULL and place in the primary key of every column of every table."""
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found: dict[str, dict[str, tuple[object, ...]]] = {
        table: {row[1]: (row[2], row[3], row[5]) for row in connection.execute(f"PRAGMA table_info({table})")}
        for table in tables
    }
    connection.close()
    return found


def foreign_keys(path: Path) -> set[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {(table, *row[2:5]) for table in tables for row in connection.execute(f"PRAGMA foreign_key_list({table})")}
    connection.close()
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


def test_every_version_has_its_golden_database() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"version-{version}.sql" for version in VERSIONS}
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert [script.revision for script in reversed(list(scripts.walk_revisions()))] == [
        str(number) for number in VERSIONS
    ]


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
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
    store = Store(path)
    assert store.epoch() == 2
    assert store.federation("casting").policy.rounds == 3
    known = {device.id: device for device in store.devices()}
    assert sorted(known) == ["line-1", "line-2"]
    assert (known["line-1"].state, known["line-1"].agent) == (DeviceState.ENROLLED, "0.1.0")
    assert known["line-2"].state is DeviceState.REVOKED
    assert len(store.register.tokens()) == len(store.register.certificates("line-1")) == 1
    assert [link.serial for link in store.key_links("casting")] == [1]
    ended = store.updates("casting", RoundAttempt(1, 1))
    assert [(update.client, update.outcome, update.weight) for update in ended] == [
        ("line-1", Outcome.ACCEPTED, 12),
        ("line-2", Outcome.ACCEPTED, 9),
    ]
    assert {update.facts for update in ended} == {'{"threads":"2"}'}
    assert [aggregate.round for aggregate in store.aggregates("casting")] == [0, 1]
    assert store.masked_sums.of("casting", RoundAttempt(2, 1)) == '{"phase":"keys"}'
    state = store.round_state("casting")
    assert (state.phase, state.round, state.participants) == (Phase.COLLECTING, 2, frozenset({"line-1"}))
    store.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_every_version_opens_with_all_that_it_holds(version: int, tmp_path: Path) -> None:
    path = restore(version, tmp_path)
    for _ in range(2):  # migrated, then as migrated
        check_content(path)


def test_a_database_of_an_earlier_version_is_brought_up_with_all_that_it_holds(
    tmp_path: Path, next_version: int
) -> None:
    path = restore(next_version - 1, tmp_path)
    for _ in range(2):
        check_content(path)
    assert "owner" in columns(path)["devices"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_migrated_database_has_the_tables_of_a_new_one(version: int, tmp_path: Path) -> None:
    path = restore(version, tmp_path)
    Store(path).close()
    new = tmp_path / "new.sqlite"
    Store(new).close()
    assert columns(path) == columns(new)
    assert foreign_keys(path) == foreign_keys(new)
    assert differences(path) == []
    assert differences(new) == []


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, next_version: int) -> None:
    path = restore(next_version - 1, tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE devices ADD COLUMN owner")  # the step meets a column that should not be there
    connection.commit()
    connection.close()
    before = columns(path)
    with pytest.raises(StoreError, match=r"database\.sqlite could not be brought from version 1 to"):
        Store(path)
    assert columns(path) == before


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


def test_a_new_postgresql_has_the_tables_that_the_queries_use(postgres: Cluster) -> None:
    database = postgres.make_database()
    for _ in range(2):
        assert differences(database) == []


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
