"""One coordinator writes a state: a second one is refused, and one whose lock is lost ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import URL

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, StorageSettings
from coordinator.errors import HomeError
from coordinator.paths import Home
from coordinator.storage.database import PASSWORD_VARIABLE
from coordinator.storage.sole_writer import sole_writer
from tests.support.coordinator.homes import call
from tests.support.postgres import PASSWORD, Cluster
from tests.support.waiting import free_port

HOLD = (
    "import sys, pathlib; from coordinator.paths import Home; from coordinator.storage.sole_writer import sole_writer\n"
    "with sole_writer(Home(pathlib.Path(sys.argv[1]))):\n    print('held', flush=True); sys.stdin.read()"
)


def home_on(database: URL, root: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    shown = database.set(password=None).render_as_string()
    return create_home(
        root,
        CoordinatorConfig(
            broker=BrokerSettings(port=free_port()),
            api=ApiSettings(port=free_port()),
            storage=StorageSettings(database=shown),
        ),
    )


def holding(home: Home) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_second_coordinator_on_the_same_database_is_refused_and_the_next_goes_on_when_the_first_is_killed(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres.make_database()
    first, second = (home_on(database, tmp_path / name, monkeypatch) for name in ("first", "second"))
    process = holding(first)
    try:
        code, output = call("coordinator", "run", "--dir", second.root)
        assert code == 2
        assert "is using postgresql+psycopg://postgres:***@127.0.0.1" in " ".join(output.split())
        assert PASSWORD not in output
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with sole_writer(second):
        pass


def test_a_coordinator_whose_lock_is_lost_ends(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = postgres.make_database()
    process = holding(home_on(database, tmp_path / "home", monkeypatch))
    postgres.end_sessions(database)
    assert process.wait(20) == 1
    _, errors = process.communicate()
    assert "is lost, and the coordinator ends" in errors


def test_another_database_and_the_same_process_again_are_no_second_coordinator(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = home_on(postgres.make_database(), tmp_path / "one", monkeypatch)
    other = home_on(postgres.make_database(), tmp_path / "other", monkeypatch)
    lost = threading.Event()
    for _ in range(2):
        with sole_writer(one, lost.set), sole_writer(other, lost.set):
            pass
    assert not lost.is_set()


def test_a_wrong_password_is_refused_without_showing_any(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    process = holding(home)
    try:
        with pytest.raises(HomeError, match=f"process {process.pid}"), sole_writer(home):
            pass
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
