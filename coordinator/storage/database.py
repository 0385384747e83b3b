"""Opens the coordinator's database, and brings it to this version in one transaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.exc import DBAPIError

from coordinator.errors import StoreError
from coordinator.storage.migrations import SCHEMA_VERSION, upgrade

BUSY_TIMEOUT_MS = 10_000


def open_database(path: Path) -> Engine:
    """Open (and when new, create) the database: SQLite in WAL mode, every commit synced to disk.

    Raises:
        StoreError: the file is of a newer version of this program, or could not be brought to this one.
    """
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", _configure)
    try:
        with engine.begin() as connection:
            # Broker and coordinator may start at once after an upgrade: one of them changes the file, the other waits.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            _bring_up(connection, str(path))
    except StoreError:
        engine.dispose()
        raise
    return engine


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
        upgrade(connection, version)
    except DBAPIError as error:
        raise StoreError(
            f"{name} could not be brought from version {version} to {SCHEMA_VERSION}, and was left as it is: {error.orig}. "
            "Use the program that wrote it, or a backup"
        ) from error
    # Programs of before Alembic look here, and refuse what is newer than they are.
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _version(connection: Connection, name: str) -> int:
    """The version of the database; 0 when it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision is None or not revision.isdecimal():
        raise StoreError(f"{name} is the database of another program (revision {revision}); name one of its own")
    return int(revision)


def _configure(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
