"""One coordinator writes a state: a lock of its directory, and in PostgreSQL one that its connection holds."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import URL, Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from coordinator.errors import HomeError
from coordinator.paths import Home
from coordinator.storage.database import database_of, make_engine, name_of, unusable

WRITER_LOCK = 0x66656463_0002
TAKE_OVER_S = 8.0
"""How long the server may take to end the session of a coordinator whose machine is gone; that of a killed one it ends at once."""
CHECK_S = 1.0
HOLDER = text(
    "SELECT client_addr, backend_start FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE locktype = 'advisory' "
    "AND (classid::bigint << 32) + objid::bigint = :lock AND datname = current_database() AND granted"
)

log = logging.getLogger(__name__)


def _exit_at_once() -> None:
    os._exit(1)


@contextmanager
def sole_writer(home: Home, lost: Callable[[], None] = _exit_at_once) -> Iterator[None]:
    """Hold the state of a home for this process.

    Args:
        home: whose directory and database.
        lost: called on a thread when the connection that holds the lock of PostgreSQL breaks; another coordinator may write then,
            so by default the process ends at once, without a further write.

    Raises:
        HomeError: another coordinator uses the directory or the database.
        StoreError: the database can't be reached.
    """
    with home.locked():
        database = database_of(home)
        if not isinstance(database, URL):
            yield
            return
        engine = make_engine(database).execution_options(isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                _take(connection, name_of(database))
                done = threading.Event()
                watch = threading.Thread(target=_watch, args=(connection, done, lost), name="writer-lock", daemon=True)
                watch.start()
                try:
                    yield
                finally:
                    done.set()
                    watch.join()
        except DBAPIError as error:
            raise unusable(database, error) from error
        finally:
            engine.dispose()


def _take(connection: Connection, name: str) -> None:
    # The server ends the session of a machine that is gone after so many seconds, and the lock with it.
    for setting, value in (("tcp_keepalives_idle", 3), ("tcp_keepalives_interval", 1), ("tcp_keepalives_count", 3)):
        connection.execute(select(func.set_config(setting, str(value), False)))  # noqa: FBT003 - for the whole session
    deadline = time.monotonic() + TAKE_OVER_S
    while not connection.execute(select(func.pg_try_advisory_lock(WRITER_LOCK))).scalar_one():
        if time.monotonic() >= deadline:
            holder = connection.execute(HOLDER, {"lock": WRITER_LOCK}).first()
            which = "" if holder is None else f" (from {holder[0] or 'this machine'}, since {holder[1]:%F %T})"
            raise HomeError(f"a coordinator{which} is using {name}; stop it first")
        time.sleep(0.1)


def _watch(connection: Connection, done: threading.Event, lost: Callable[[], None]) -> None:
    try:
        while not done.wait(CHECK_S):
            connection.execute(select(1))
    except DBAPIError as error:
        log.critical(
            "the connection that holds the database for this coordinator is lost, and the coordinator ends; after a restart it "
            "goes on with the same attempt: %s",
            str(error.orig).strip(),
        )
        lost()
