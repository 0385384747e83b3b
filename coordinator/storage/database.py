"""Opens the coordinator's database, SQLite or PostgreSQL, upgrades it to this version in one transaction, and detects lost commits.

The high-water mark is a small signed file with counts of the database's content. It has only counts that never decrease. It is raised after each
commit, so it may lag behind the database but is never ahead of it.
"""

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, delete, event, func, insert, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from coordinator.errors import ConfigError, StoreError
from coordinator.paths import Home
from coordinator.storage import schema
from coordinator.storage.migrations import SCHEMA_VERSION, upgrade
from fedcg.files import DISK_FAILS, PRIVATE, advice_for, locked, replace_durably

BUSY_TIMEOUT_MS = 10_000
CHECKPOINT_TIMEOUT_MS = 1_000
"""A checkpoint blocks writers while it waits for readers, so this is a tenth of the writers' timeout."""
CONNECT_TIMEOUT_S = 5
DEAD_PEER_S = 6
"""Seconds without a response after which the server ends an unreachable machine's session and releases its locks."""
PASSWORD_VARIABLE = "FEDCG_DATABASE_PASSWORD"  # noqa: S105 - the name of an environment variable
UPGRADE_LOCK = 0x66656463_0001
"""PostgreSQL advisory lock that a program holds while it changes the schema."""


def database_of(home: Home) -> Path | URL:
    """A coordinator's database: its file, or the URL from coordinator.toml with the password.

    Raises:
        ConfigError: the URL is invalid, or the password's file can't be read.
    """
    settings = home.config().storage
    if settings.database is None:
        return home.database
    try:
        url = make_url(settings.database)
    except (ArgumentError, ValueError):
        raise ConfigError(f"{home.config_file}: storage.database is not a database URL") from None
    password = os.environ.get(PASSWORD_VARIABLE) or home.password("storage", settings.database_password_file)
    return url.set(password=password) if password else url


def name_of(database: Path | URL) -> str:
    """The database's name in messages, without its password."""
    return database.render_as_string() if isinstance(database, URL) else str(database)


def open_database(database: Path | URL) -> Engine:
    """Open the database, or create it if new; every commit is on disk when it returns.

    Raises:
        StoreError: it can't be reached, is from a newer version of this program, or could not be upgraded.
    """
    engine = make_engine(database)
    try:
        with engine.begin() as connection:
            # Broker and coordinator may start at the same time after an upgrade: one changes the tables, the other waits.
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
    """Connections to the database; none is opened yet.

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
    """The error for the operator if a database can't be read or written."""
    lines = str(error.orig).strip().splitlines() or ["no reason given"]
    if isinstance(database, Path) and not isinstance(error, OperationalError):
        return _damaged(str(database), lines[0])
    remedy = "Check [storage] in coordinator.toml and the server"
    if isinstance(database, Path):
        user = os.geteuid()
        remedy = f"Its disk may be full or read-only, or the user with id {user} can't write to it and its folder"
        if "is full" in lines[0] or "locked" in lines[0]:
            remedy = f"Free space on {database.parent}" if "full" in lines[0] else "A program has locked it: try again"
    return StoreError(f"{name_of(database)} can't be used: {lines[0]}. {remedy}")


@contextmanager
def explained(home: Home) -> Iterator[None]:
    """Turn errors of the database or the home's disk into StoreErrors that name it.

    Raises:
        StoreError: for an error of the database, or of the disk without a file name.
    """
    try:
        yield
    except DBAPIError as error:
        raise unusable(database_of(home), error) from error
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_FAILS:
            raise
        raise StoreError(f"{error.strerror}. {advice_for(error, home.root)}") from error


def check_whole(home: Home) -> None:
    """Check the structure of all SQLite pages; PostgreSQL checks its own.

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
    """Move all SQLite commits from the log into the database file; if a reader is slow, leave it to the next call."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection, suppress(OperationalError):  # such as a full disk: all is committed
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
            f"{name} has schema version {version}, but this program reads up to version {SCHEMA_VERSION}. Use the program that "
            "wrote it, or create a new coordinator directory"
        )
    if version == SCHEMA_VERSION:
        return
    try:
        upgrade(connection, SCHEMA_VERSION)
    except DBAPIError as error:
        raise StoreError(
            f"{name} could not be upgraded from version {version} to {SCHEMA_VERSION} and is unchanged: {error.orig}. "
            "Use the program that wrote it, or restore a backup"
        ) from error


def _version(connection: Connection, name: str) -> int:
    """The version of the database; 0 if it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return 0
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision is None or not revision.isdecimal():
        raise StoreError(f"{name} is the database of another program (revision {revision}); use a separate database")
    return int(revision)


def _end_with_the_machine(connection: Any, _record: object) -> None:
    """Make the server detect an unreachable machine: keepalive probes, and a timeout for unacknowledged data."""
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


EPOCH_STEP = 1_000_000
"""Added to a recovery's epoch if the clock is behind it: more than the number of starts since."""
_DOMAIN = b"fedcg high-water mark 1\0"
_COUNTED = {
    "devices": schema.devices.c.id,
    "certificates": schema.certificates.c.serial,
    "revoked certificates": schema.certificates.c.revoked_at,
    "tokens": schema.tokens.c.id,
    "used tokens": schema.tokens.c.used_at,
    "revoked tokens": schema.tokens.c.revoked_at,
    "API tokens": schema.api_tokens.c.id,
    "revoked API tokens": schema.api_tokens.c.revoked_at,
    "federations": schema.federations.c.id,
    "replacements of the message key": schema.key_links.c.serial,
}
_OF_FEDERATIONS = {"aggregates": schema.aggregates.c.federation, "attempts": schema.attempts.c.federation}
"""Columns whose non-null values are counted: in total, and per federation."""

log = logging.getLogger(__name__)


def recovered_epoch(epoch: int) -> int:
    """The epoch after a restored backup or an accepted loss: the time in milliseconds, above all earlier recoveries and their starts.

    Args:
        epoch: the highest epoch in this database; a coordinator from another backup may have used later ones.
    """
    now = int(1000 * time.time())
    return now if now > epoch else epoch + EPOCH_STEP


def counts_of(connection: Connection) -> dict[str, int]:
    """Counts of the database's content, by name; they never decrease."""
    found = {name: connection.execute(select(func.count(column))).scalar_one() for name, column in _COUNTED.items()}
    found["epoch"] = connection.execute(select(schema.leases.c.epoch)).scalar_one_or_none() or 0
    for name, column in _OF_FEDERATIONS.items():
        rows = connection.execute(select(column, func.count()).group_by(column))
        found |= {f"{name} of {federation}": count for federation, count in rows}
    return found


class HighWater:
    """The high-water mark of a home's database.

    Args:
        home: the home with its file and the secret that signs it.
        engine: engine of the database.
    """

    def __init__(self, home: Home, engine: Engine) -> None:
        self._home, self._path, self._engine = home, home.high_water, engine
        self._raised: dict[str, int] = {}

    def check(self) -> None:
        """Check that the database has lost no commits.

        Raises:
            StoreError: commits or the mark are lost; names them and the next step.
        """
        mark = self._read()  # before the database, whose counts may only increase in the meantime
        with self._engine.connect() as connection:
            held = counts_of(connection)
        if mark is None:
            if self._engine.dialect.name == "sqlite" and any(held.values()):
                raise StoreError(f"{self._path} is missing: the database may have lost commits. {self._advice()}")
            self.lift()  # a new home, or a machine that takes over with copied configuration and keys
        elif lost := [name for name, count in mark.items() if held.get(name, 0) < count]:
            missing = ", ".join(f"{name} ({held.get(name, 0)} now, {mark[name]} before)" for name in lost)
            raise StoreError(f"{name_of(database_of(self._home))} has lost commits: {missing}. {self._advice()}")

    def lift(self) -> None:
        """Raise the mark to the database's counts. Disk errors are logged, and the mark then lags behind."""
        with locked(self._path.with_suffix(".lock"), mode=PRIVATE):
            try:
                with self._engine.connect() as connection:
                    held = counts_of(connection)
                if held != self._raised:
                    body = json.dumps(held, sort_keys=True)
                    replace_durably(self._path, f"{body}\n{self._signature(body)}\n")
                    self._raised = held
            except OSError as error:
                log.warning("%s can't be written; the next change tries again: %s", self._path, error)

    def accept_loss(self) -> None:
        """Accept the database as it is, with an epoch above all that devices may have received."""
        try:
            self.check()
        except StoreError as error:
            log.warning("continuing without the lost data: %s", error)
        try:
            mark = self._read() or {}
        except StoreError:
            mark = {}
        with self._engine.begin() as connection:
            epoch = recovered_epoch(max(counts_of(connection)["epoch"], mark.get("epoch", 0)))
            connection.execute(delete(schema.leases))  # the row itself may be lost
            connection.execute(insert(schema.leases).values(id=1, epoch=epoch))
        self.lift()

    def _advice(self) -> str:
        return (
            "Restore a backup into a new directory: `fedcg coordinator restore FILE --dir NEW`. Or continue without the lost data: "
            f"`fedcg coordinator run --dir {self._home.root} --accept-loss`. Then compare {self._home.events_file} "
            "with `fedcg device list`, and revoke or enrol devices again"
        )

    def _read(self) -> dict[str, int] | None:
        """The mark; None without one.

        Raises:
            StoreError: it is damaged, or signed with another secret.
        """
        try:
            body, _, signature = self._path.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None
        except ValueError:
            body = signature = ""
        if not hmac.compare_digest(signature.strip().encode(), self._signature(body).encode()):
            raise StoreError(f"{self._path} is damaged, or signed with another secret. {self._advice()}")
        return {str(name): int(count) for name, count in json.loads(body).items()}

    def _signature(self, body: str) -> str:
        return hmac.new(self._home.secret(), _DOMAIN + body.encode(), hashlib.sha256).hexdigest()
