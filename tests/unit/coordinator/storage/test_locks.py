"""One coordinator writes a state, and one process changes its members: also where the other one is on another machine, or gone."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from coordinator.broker.access_lists import refresh_access
from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, StorageSettings
from coordinator.errors import HomeError
from coordinator.paths import Home
from coordinator.storage import locks
from coordinator.storage.database import PASSWORD_VARIABLE
from coordinator.storage.locks import changing_members, sole_writer
from coordinator.storage.store import Store
from fedcg.errors import ALREADY_RUNNING
from tests.support.coordinator.homes import add_federation, call
from tests.support.machines import ADDRESS, needs_machines, second_machine
from tests.support.postgres import PASSWORD, Cluster, running_cluster
from tests.support.waiting import free_port, wait_until

HOLD = """
import pathlib, sys
from coordinator.paths import Home
from coordinator.storage import locks
with getattr(locks, sys.argv[2])(Home(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_ROW = """
import pathlib, sys
from sqlalchemy import select
from coordinator.paths import Home
from coordinator.storage import schema
from coordinator.storage.database import database_of, open_database
with open_database(database_of(Home(pathlib.Path(sys.argv[1])))).begin() as connection:
    connection.execute(select(schema.leases).with_for_update()).one()
    print("held", flush=True)
    sys.stdin.read()
"""


def home_on(database: URL, root: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    storage = StorageSettings(database=database.set(password=None).render_as_string())
    broker, api = BrokerSettings(port=free_port()), ApiSettings(port=free_port())
    return create_home(root, CoordinatorConfig(broker=broker, api=api, storage=storage))


@pytest.fixture
def homes(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Home, Home]:
    """The directories of two machines on one database."""
    database = postgres.make_database()
    return home_on(database, tmp_path / "first", monkeypatch), home_on(database, tmp_path / "second", monkeypatch)


@contextmanager
def holding(
    home: Home, lock: str = "sole_writer", script: str = HOLD, where: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock until its input ends; killed at the end of the block."""
    words, pipe = [*where, sys.executable, "-c", script, str(home.root), lock], subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_coordinator_is_refused_until_the_first_is_killed(homes: tuple[Home, Home]) -> None:
    first, second = homes
    with holding(first):
        words = (sys.executable, "-m", "fedcg", "coordinator", "run", "--dir", second.root)
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert refused.returncode == ALREADY_RUNNING
        assert "is using postgresql+psycopg://postgres:***@127.0.0.1" in " ".join(refused.stderr.split())
        assert PASSWORD not in refused.stdout + refused.stderr
    with sole_writer(second):
        pass


@pytest.mark.slow
def test_a_coordinator_that_hangs_loses_its_lock_and_ends_when_it_wakes(homes: tuple[Home, Home]) -> None:
    first, second = homes
    with holding(first) as process:
        process.send_signal(signal.SIGSTOP)
        with sole_writer(second):
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 1


@needs_machines
@pytest.mark.slow
def test_locks_of_a_vanished_machine_are_free_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with second_machine() as machine, running_cluster(ADDRESS) as cluster:
        database = cluster.make_database()
        first, second = (home_on(database, tmp_path / name, monkeypatch) for name in ("first", "second"))
        with closing(Store.of(second)) as store:
            assert store.next_epoch() == 1
            with (
                holding(first, where=machine.enter),
                holding(first, "changing_members", where=machine.enter),
                holding(first, script=HOLD_ROW, where=machine.enter),
            ):
                machine.vanish()
                with sole_writer(second), changing_members(second):
                    assert store.next_epoch() == 2


@pytest.mark.slow
def test_machines_change_members_in_turn(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = postgres.make_database()
    first = home_on(database, tmp_path / "first", monkeypatch)
    add_federation(first, "alpha")
    second = Home(tmp_path / "second")
    shutil.copytree(first.root, second.root)
    words = (sys.executable, "-m", "fedcg", "device", "add", "box", "--out", tmp_path, "--dir", second.root)
    with holding(first, "changing_members") as process:
        adding = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: waiting_at(database) == 1, "the command on the other machine waits for the lock")
        with closing(Store.of(first)) as store:
            assert store.members() == []
        process.communicate("")
    output, _ = adding.communicate(timeout=60)
    assert adding.returncode == 0, output
    assert refresh_access(first).devices == ("box",)


def waiting_at(database: URL) -> int:
    engine = create_engine(database)
    with engine.connect() as connection:
        count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = "
        here = "(SELECT oid FROM pg_database WHERE datname = current_database())"
        waiting = connection.execute(text(count + here)).scalar_one()
    engine.dispose()
    return int(waiting)


def test_a_hanging_change_of_members_is_named(homes: tuple[Home, Home], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = homes
    monkeypatch.setattr(locks, "MEMBERS_WAIT_S", 1)
    with holding(first, "changing_members"):
        code, output = call("token", "create", "--dir", second.root)
    assert code == ALREADY_RUNNING
    assert "(from 127.0.0.1, since 20" in output
    assert "is changing the devices or federations of" in output


def test_a_coordinator_without_a_lock_ends(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = postgres.make_database()
    with holding(home_on(database, tmp_path / "home", monkeypatch)) as process:
        postgres.end_sessions(database)
        assert process.wait(20) == 1
        _, errors = process.communicate()
        assert "is lost, and the coordinator ends" in errors


def test_another_database_is_not_locked(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = home_on(postgres.make_database(), tmp_path / "one", monkeypatch)
    other = home_on(postgres.make_database(), tmp_path / "other", monkeypatch)
    lost = threading.Event()
    for _ in range(2):
        with sole_writer(one, lost.set), sole_writer(other, lost.set):
            pass
    assert not lost.is_set()


def test_a_wrong_password_is_never_shown(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_on(postgres.make_database(), tmp_path / "home", monkeypatch)
    monkeypatch.setenv(PASSWORD_VARIABLE, "a-wrong-one")
    code, output = call("federation", "show", "--dir", home.root)
    assert code == 1
    assert "password authentication failed" in output
    assert "a-wrong-one" not in output


def test_the_password_may_be_in_a_file(postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = home_on(postgres.make_database(), tmp_path / "home", monkeypatch)
    config = home.config()
    monkeypatch.delenv(PASSWORD_VARIABLE)
    (home.root / "database.password").write_text(f"{PASSWORD}\n")
    text = home.config_file.read_text().replace(
        "[storage]\n", '[storage]\ndatabase_password_file = "database.password"\n'
    )
    home.config_file.write_text(text)
    assert home.config().storage == config.storage.model_copy(update={"database_password_file": "database.password"})
    code, output = call("device", "list", "--dir", home.root)
    assert code == 0, output


def test_a_directory_of_sqlite_has_one_coordinator(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig())
    with holding(home) as process, pytest.raises(HomeError, match=f"process {process.pid}"), sole_writer(home):
        pass
