"""Opens the coordinator's database, SQLite or PostgreSQL, brings it to this version in one transaction, and notices when it has lost commits.

The high-water mark is a small signed file of what the database has held. It counts only what never falls. It is raised after the commit that it
counts, so it may lag behind the database and is never ahead of it.
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
    """The error of a database that can't be read or written, for the operator."""
    lines = str(error.orig).strip().splitlines() or ["no reason given"]
    if isinstance(database, Path) and not isinstance(error, OperationalError):
        return _damaged(str(database), lines[0])
    remedy = "Check [storage] in coordinator.toml and the server"
    if isinstance(database, Path):
        user = os.geteuid()
        remedy = f"Its disk may be full or read-only, or the user with id {user} may not write it and its folder"
        if "is full" in lines[0] or "locked" in lines[0]:
            remedy = f"Free space on {database.parent}" if "full" in lines[0] else "Another program holds it: try again"
    return StoreError(f"{name_of(database)} can't be used: {lines[0]}. {remedy}")


@contextmanager
def explained(home: Home) -> Iterator[None]:
    """Name the database, or the folder, in what is raised when either can't be written.

    Raises:
        StoreError: in place of an error of the database, and of one of the disk that names no file.
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


EPOCH_STEP = 1_000_000
"""Added to the epoch of a recovery where the clock is behind it: more than the coordinator can have been started since."""
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
"""Columns whose values are counted, without nulls: all, and those of each federation."""

log = logging.getLogger(__name__)


def recovered_epoch(epoch: int) -> int:
    """The epoch after a backup is restored or a loss is accepted: the time in milliseconds, above those of earlier recoveries and their starts.

    Args:
        epoch: the highest one that is known here; a coordinator of another backup may have taken later ones.
    """
    now = int(1000 * time.time())
    return now if now > epoch else epoch + EPOCH_STEP


def counts_of(connection: Connection) -> dict[str, int]:
    """What the database holds, by name; none of these numbers ever falls."""
    found = {name: connection.execute(select(func.count(column))).scalar_one() for name, column in _COUNTED.items()}
    found["epoch"] = connection.execute(select(schema.leases.c.epoch)).scalar_one_or_none() or 0
    for name, column in _OF_FEDERATIONS.items():
        rows = connection.execute(select(column, func.count()).group_by(column))
        found |= {f"{name} of {federation}": count for federation, count in rows}
    return found


class HighWater:
    """The mark of one home's database.

    Args:
        home: where its file and the secret that signs it are.
        engine: of the database.
    """

    def __init__(self, home: Home, engine: Engine) -> None:
        self._home, self._path, self._engine = home, home.high_water, engine
        self._raised: dict[str, int] = {}

    def check(self) -> None:
        """Check that the database holds what it has held before.

        Raises:
            StoreError: commits are lost, or the mark is; says which, and how to go on.
        """
        mark = self._read()  # before the database, whose numbers may only rise meanwhile
        with self._engine.connect() as connection:
            held = counts_of(connection)
        if mark is None:
            if self._engine.dialect.name == "sqlite" and any(held.values()):
                raise StoreError(f"{self._path} is missing: the database may have lost commits. {self._advice()}")
            self.lift()  # a new home, or a machine that takes over with a copy of configuration and keys
        elif lost := [name for name, count in mark.items() if held.get(name, 0) < count]:
            missing = ", ".join(f"{name} ({held.get(name, 0)} now, {mark[name]} before)" for name in lost)
            raise StoreError(f"{name_of(database_of(self._home))} has lost commits: {missing}. {self._advice()}")

    def lift(self) -> None:
        """Raise the mark to what the database holds; a disk that does not take it is reported, and the mark lags behind."""
        with locked(self._path.with_suffix(".lock"), mode=PRIVATE):
            try:
                with self._engine.connect() as connection:
                    held = counts_of(connection)
                if held != self._raised:
                    body = json.dumps(held, sort_keys=True)
                    replace_durably(self._path, f"{body}\n{self._signature(body)}\n")
                    self._raised = held
            except OSError as error:
                log.warning("%s can't be written, and the next change writes it: %s", self._path, error)

    def accept_loss(self) -> None:
        """Take the database as it is, with an epoch above all that devices may have seen."""
        try:
            self.check()
        except StoreError as error:
            log.warning("going on without what is lost: %s", error)
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
            "Restore a backup into a new directory: `fedcg coordinator restore FILE --dir NEW`. Or go on without what is lost: "
            f"`fedcg coordinator run --dir {self._home.root} --accept-loss`. Then compare {self._home.events_file} "
            "with `fedcg device list`, and revoke or enrol again"
        )

    def _read(self) -> dict[str, int] | None:
        """The mark, None without one.

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
