"""Locks of a coordinator's state: only one process runs the coordinator, and only one at a time changes its members.

Each is a file lock in the directory. With PostgreSQL, it is also an advisory lock in the database, for processes on other machines.
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
"""How long a coordinator waits for the lock of an unreachable or hanging one; a killed one's lock is free at once."""
MEMBERS_WAIT_S = 60
"""A change takes at most about 20 s: for a new federation's first weights, or a broker that does not respond."""
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
    """Lock the state of a home for this process.

    Args:
        home: the home with directory and database.
        lost: called on a thread if the connection with the PostgreSQL lock breaks. Another coordinator may then write, so by default the
            process exits at once, without another write.

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
    """Wait for the members' lock and hold it, so that database, revocation list and access list stay consistent.

    Raises:
        HomeError: another machine has held the database's lock for a minute.
        StoreError: the database can't be reached.
    """
    busy = "a program{} is changing the devices or federations of {} and does not end; try again, or stop it"
    with locked(home.root / "members.lock", mode=PRIVATE), _database_lock(home, MEMBERS_LOCK, MEMBERS_WAIT_S, busy):
        yield


@contextmanager
def _database_lock(
    home: Home, lock: int, wait_s: int, busy: str, *, is_watched: bool = False
) -> Iterator[Connection | None]:
    """Hold a PostgreSQL advisory lock; yield its connection, or None with SQLite, which only one machine can use.

    The server ends a watched session and its lock after `DEAD_PEER_S` without activity, since its process hangs.

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
    """Changes a PostgreSQL setting for the whole session."""
    return select(func.set_config(setting, value, False))  # noqa: FBT003 - not only for the transaction


def _watch(connection: Connection, done: threading.Event, lost: Callable[[], None]) -> None:
    try:
        while not done.wait(CHECK_S):
            connection.execute(select(1))
    except DBAPIError as error:
        log.critical(
            "the connection with the coordinator's database lock is lost, so the coordinator stops; after a restart it "
            "resumes the same attempt: %s",
            str(error.orig).strip(),
        )
        lost()
