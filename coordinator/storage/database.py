"""Opens the coordinator's database, SQLite or PostgreSQL, and brings it to this version in one transaction."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from coordinator.errors import ConfigError, StoreError
from coordinator.paths import Home
from coordinator.storage.migrations import SCHEMA_VERSION, upgrade

BUSY_TIMEOUT_MS = 10_000
CHECKPOINT_TIMEOUT_MS = 1_000
"""A checkpoint keeps others from writing while it waits for readers: a tenth of what they bear."""
CONNECT_TIMEOUT_S = 5
DEAD_PEER_S = 6
"""After so many seconds without an answer the server ends the session of a machine that is gone, and with it every lock."""
PASSWORD_VARIABLE = "FEDCG_DATABASE_PASSWORD"  # noqa: S105 - the name of a variable
UPGRADE_LOCK = 0x66656463_0001
"""Advisory lock of PostgreSQL that a program holds while it changes the schema."""


def database_of(home: Home) -> Path | URL:
    """The database of a coordinator: its file, or the URL from coordinator.toml with the password in place.

    Raises:
        ConfigError: the URL can't be read, or the file with the password.
    """
    settings = home.config().storage
    if settings.database is None:
        return home.database
    try:
        url = make_url(settings.database)
        if password := os.environ.get(PASSWORD_VARIABLE):
            return url.set(password=password)
        if settings.database_password_file is not None:
            url = url.set(password=(home.root / settings.database_password_file).read_text(encoding="utf-8").strip())
    except (ArgumentError, ValueError):
        raise ConfigError(f"{home.config_file}: storage.database is not the URL of a database") from None
    except OSError as error:
        raise ConfigError(f"{home.config_file}: storage.database_password_file can't be read: {error}") from error
    return url


def name_of(database: Path | URL) -> str:
    """The database in messages, without its password."""
    return database.render_as_string() if isinstance(database, URL) else str(database)


def open_database(database: Path | URL) -> Engine:
    """Open (and when new, create) the database; every commit is on the disk when it returns.

    Raises:
        StoreError: it can't be reached, is of a newer version of this program, or could not be brought to this one.
    """
    engine = make_engine(database)
    try:
        with engine.begin() as connection:
            # Broker and coordinator may start at once after an upgrade: one of them changes the tables, the other waits.
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.execute(select(func.pg_advisory_xact_lock(UPGRADE_LOCK)))
            _bring_up(connection, name_of(database))
    except StoreError:
        engine.dispose()
        raise
    except DBAPIError as error:
        engine.dispose()
        raise unusable(database, error) from error
    return engine


def make_engine(database: Path | URL) -> Engine:
    """Connections to the database; none is open yet.

    Raises:
        StoreError: the driver for PostgreSQL is not installed.
    """
    if isinstance(database, Path):
        engine = create_engine(f"sqlite:///{database}", hide_parameters=True)
        event.listen(engine, "connect", _configure)
        return engine
    limits = {"connect_timeout": CONNECT_TIMEOUT_S, "tcp_user_timeout": CONNECT_TIMEOUT_S * 1000}
    try:
        engine = create_engine(database, connect_args=limits, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError as error:
        raise StoreError("a database in PostgreSQL needs psycopg: pip install 'fedcg-edge[postgres]'") from error
    event.listen(engine, "connect", _end_with_the_machine)
    return engine


def unusable(database: Path | URL, error: DBAPIError) -> StoreError:
    """The error of a database that can't be opened, for the operator."""
    lines = str(error.orig).strip().splitlines() or ["no reason given"]
    if isinstance(database, Path) and not isinstance(error, OperationalError):
        return _damaged(str(database), lines[0])
    return StoreError(
        f"{name_of(database)} can't be used: {lines[0]}. Check [storage] in coordinator.toml and the server"
    )


def check_whole(home: Home) -> None:
    """Check the structure of all pages of SQLite; PostgreSQL checks its own.

    Raises:
        StoreError: the database is damaged.
    """
    database = database_of(home)
    if isinstance(database, URL):
        return
    engine = make_engine(database)
    try:
        with engine.connect() as connection:
            found = list(connection.exec_driver_sql("PRAGMA quick_check(1)").scalars())
    except DBAPIError as error:
        raise unusable(database, error) from error
    finally:
        engine.dispose()
    if found != ["ok"]:
        raise _damaged(str(database), " ".join(map(str, found)))


def checkpoint(engine: Engine) -> None:
    """Move all commits of SQLite from its log into the database file, unless a reader is slow: then the next call does."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection, suppress(OperationalError):  # such as a full disk: all is committed already
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {CHECKPOINT_TIMEOUT_MS}")
        try:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
        finally:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")


def _damaged(name: str, why: str) -> StoreError:
    remedy = "Restore a backup into a new directory: `fedcg coordinator restore FILE --dir NEW`"
    return StoreError(f"{name} is damaged: {' '.join(why.split())[:300]}. {remedy}")


def _bring_up(connection: Connection, name: str) -> None:
    version = _version(connection, name)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{name} has schema version {version}; this program reads up to version {SCHEMA_VERSION}. Use the program that "
            "wrote it, or start a new coordinator directory"
        )
    if version == SCHEMA_VERSION:
        return
    try:
        upgrade(connection, SCHEMA_VERSION)
    except DBAPIError as error:
        raise StoreError(
            f"{name} could not be brought from version {version} to {SCHEMA_VERSION}, and was left as it is: {error.orig}. "
            "Use the program that wrote it, or a backup"
        ) from error


def _version(connection: Connection, name: str) -> int:
    """The version of the database; 0 when it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return 0
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision is None or not revision.isdecimal():
        raise StoreError(f"{name} is the database of another program (revision {revision}); name one of its own")
    return int(revision)


def _end_with_the_machine(connection: Any, _record: object) -> None:
    """Make the server notice a machine that is gone: probes when nothing is sent, and a bound for what is not acknowledged."""
    settings = {
        "tcp_keepalives_idle": DEAD_PEER_S // 2,
        "tcp_keepalives_interval": 1,
        "tcp_keepalives_count": DEAD_PEER_S // 2,
        "tcp_user_timeout": DEAD_PEER_S * 1000,
    }
    for name, value in settings.items():
        connection.execute("SELECT set_config(%s, %s, false)", (name, str(value)))
    connection.commit()


def _configure(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
