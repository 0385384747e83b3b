"""Tables of the coordinator's database, opening it, and reading rows as records. Queries live in `store` and `register`.

Every table is keyed by federation but those of devices, certificates, enrolment tokens and the lease. The schema's version is in
`PRAGMA user_version`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Insert,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Update,
    create_engine,
    event,
)
from sqlalchemy.exc import OperationalError

from coordinator.errors import StoreError
from coordinator.storage.migrations import SCHEMA_VERSION, migrate

BUSY_TIMEOUT_MS = 10_000
RecordT = TypeVar("RecordT")

metadata = MetaData()

leases = Table(
    "leases",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
)
devices = Table(
    "devices",
    metadata,
    Column("id", String, primary_key=True),
    Column("public_key", String, nullable=False),
    Column("enrolled_at", Float, nullable=False),
    Column("last_seen_at", Float),
    Column("agent", String),
    Column("state", String, nullable=False, server_default="enrolled"),
    Column("ended_at", Float),
    Column("ended_because", String, nullable=False, server_default=""),
    Column("disabled_at", Float),
    Column("disabled_because", String, nullable=False, server_default=""),
)
certificates = Table(
    "certificates",
    metadata,
    Column("serial", String, primary_key=True),
    Column("device", ForeignKey("devices.id"), nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("pem", String, nullable=False),
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", String, primary_key=True),
    Column("secret_hash", String, nullable=False),
    Column("device", String),
    Column("replaces", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("used_at", Float),
    Column("used_by", String),
    Column("used_for", String),
    Column("serial", String),
    Column("federation", String),
)
federations = Table(
    "federations",
    metadata,
    Column("id", String, primary_key=True),
    Column("method", String, nullable=False),
    Column("spec", String, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("min_clients", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("deadline_s", Float, nullable=False),
    Column("first_attempt", Integer, nullable=False, default=1),
    Column("created_at", Float, nullable=False),
    Column("status", String, nullable=False, server_default="running"),
    Column("status_reason", String, nullable=False, server_default=""),
    Column("policy", String, nullable=False, server_default="{}"),
    Column("continued_from", String),
)
key_links = Table(
    "key_links",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("serial", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("old", String, nullable=False),
    Column("new", String, nullable=False),
    Column("signature", String, nullable=False),
    Column("made_at", Float, nullable=False),
)
attempts = Table(
    "attempts",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("base", String, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("deadline_at", Float, nullable=False),
    Column("distilling_at", Float),
    Column("aggregate_stored_at", Float),
    Column("closed_at", Float),
    Column("reason", String, nullable=False, default=""),
)
participants = Table(
    "participants",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("client", ForeignKey("devices.id"), primary_key=True),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False, default=""),
)
updates = Table(
    "updates",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("client", ForeignKey("devices.id"), primary_key=True),
    Column("artifact", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("outcome", String, nullable=False),
    Column("reason", String, nullable=False, default=""),
    Column("report", String),
    Column("manifest_at", Float, nullable=False),
    Column("stored_at", Float, nullable=False),
    Column("distances", String),
    Column("weight", Integer),
    Column("figures", String),
)
aggregates = Table(
    "aggregates",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("artifact", String, nullable=False),
    Column("size", Integer, nullable=False),
    Column("server_state", String, nullable=False),
    Column("stored_at", Float, nullable=False),
)


class Queries:
    """Reads rows as records that have their columns as fields, and writes in transactions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _all(self, kind: Callable[..., RecordT], query: Select[Any]) -> list[RecordT]:
        with self._engine.connect() as connection:
            return [kind(**row) for row in connection.execute(query).mappings()]

    def _one(self, kind: Callable[..., RecordT], query: Select[Any]) -> RecordT | None:
        return next(iter(self._all(kind, query)), None)

    def _write(self, *statements: Insert | Update) -> None:
        """Execute statements in one transaction, in their order."""
        with self._engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)


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
            _bring_up(connection, path)
    except StoreError:
        engine.dispose()
        raise
    return engine


def _bring_up(connection: Connection, path: Path) -> None:
    version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}; this program reads up to version {SCHEMA_VERSION}. Use the program that "
            "wrote it, or start a new coordinator directory"
        )
    try:
        if version == 0:
            metadata.create_all(connection)
        else:
            migrate(connection, version)
    except OperationalError as error:
        raise StoreError(
            f"{path} could not be brought from version {version} to {SCHEMA_VERSION}, and was left as it is: {error.orig}. "
            "Use the program that wrote it, or a backup"
        ) from error
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _configure(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
