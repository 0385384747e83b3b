"""Locks of a coordinator's state: one process runs the coordinator, and one process at a time changes its members.

Each is a lock of a file in the directory and, with PostgreSQL, an advisory lock of the database as well, for processes on other machines.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import URL, Connection, Select, func, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from coordinator.errors import HomeError
from coordinator.paths import Home
from coordinator.storage.database import DEAD_PEER_S, database_of, make_engine, name_of, unusable
from fedcg.errors import ALREADY_RUNNING
from fedcg.files import PRIVATE, locked

WRITER_LOCK = 0x66656463_0002
MEMBERS_LOCK = 0x66656463_0003
CHECK_S = 1.0
TAKE_OVER_S = DEAD_PEER_S + 2
"""How long a coordinator waits for the lock of one that vanished or hangs; that of a killed one is free at once."""
MEMBERS_WAIT_S = 60
"""A change takes at most about 20 s: the first weights of a new federation, or a broker that does not answer."""
LOCK_TIMEOUT = "55P03"  # PostgreSQL's lock_not_available
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
    busy = "a coordinator{} is using {}; stop it first"
    with home.locked(), _database_lock(home, WRITER_LOCK, TAKE_OVER_S, busy, is_watched=True) as held:
        if held is None:
            yield
            return
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(held, done, lost), name="writer-lock", daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()


@contextmanager
def changing_members(home: Home) -> Iterator[None]:
    """Wait for, and hold, the lock of the members: database, revocation list and access list fit together.

    Raises:
        HomeError: another machine has held the lock of the database for a minute.
        StoreError: the database can't be reached.
    """
    busy = "a program{} is changing the devices or federations of {} and does not end; try again, or end that program"
    with locked(home.root / "members.lock", mode=PRIVATE), _database_lock(home, MEMBERS_LOCK, MEMBERS_WAIT_S, busy):
        yield


@contextmanager
def _database_lock(
    home: Home, lock: int, wait_s: int, busy: str, *, is_watched: bool = False
) -> Iterator[Connection | None]:
    """Hold an advisory lock of PostgreSQL on the connection that is given; None with SQLite, which one machine has.

    The server ends a session that is watched, and with it the lock, when it was idle for `DEAD_PEER_S`: its process hangs.

    Raises:
        HomeError: `busy`, with the lock's holder and the database, after `wait_s`.
        StoreError: the database can't be reached.
    """
    database = database_of(home)
    if not isinstance(database, URL):
        yield None
        return
    with ExitStack() as stack:
        engine = make_engine(database).execution_options(isolation_level="AUTOCOMMIT")
        stack.callback(engine.dispose)
        try:
            connection = stack.enter_context(engine.connect())
            if is_watched:
                connection.execute(_set("idle_session_timeout", f"{DEAD_PEER_S}s"))
            connection.execute(_set("lock_timeout", f"{wait_s}s"))
            connection.execute(select(func.pg_advisory_lock(lock)))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != LOCK_TIMEOUT:
                raise unusable(database, error) from error
            holder = connection.execute(HOLDER, {"lock": lock}).first()
            which = "" if holder is None else f" (from {holder[0] or 'this machine'}, since {holder[1]:%F %T})"
            raise HomeError(busy.format(which, name_of(database)), exit_code=ALREADY_RUNNING) from error
        except DBAPIError as error:
            raise unusable(database, error) from error
        yield connection


def _set(setting: str, value: str) -> Select[tuple[str]]:
    """Sets a setting of PostgreSQL for the whole session."""
    return select(func.set_config(setting, value, False))  # noqa: FBT003 - not for the transaction alone


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
