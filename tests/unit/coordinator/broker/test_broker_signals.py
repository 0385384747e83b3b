"""Which process gets SIGHUP after a change of the broker's lists: the broker, and never another process with its process id."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.broker import deployed_mosquitto as own_broker
from coordinator.broker.access_lists import PID_NAME, publish_access, refresh_access
from coordinator.broker.deployed_mosquitto import PID_FILE, deploy
from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.storage.store import Store
from tests.support.waiting import free_port, wait_until


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it gets SIGHUP."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def assert_got_no_sighup(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM  # SIGHUP would have come first


def make_home(root: Path) -> Home:
    home = create_home(root, CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    Store(home.database).close()
    return home


def make_home_with_deployed_broker(root: Path, pid: str) -> Home:
    home = make_home(root)
    path = home.broker / PID_FILE
    path.parent.mkdir(parents=True)
    path.write_text(pid)
    return home


def test_a_stranger_with_the_process_id_of_the_operators_mosquitto_survives(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    home = make_home_with_deployed_broker(tmp_path / "home", f"{stranger.pid}\n")
    assert publish_access(home) is False
    assert_got_no_sighup(stranger)


@pytest.mark.parametrize("text", ["0", "-1", "", "text"])
def test_a_pid_file_that_names_no_process_signals_none(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 and -1 would be this process's own group, and every process there is."""
    home = make_home_with_deployed_broker(tmp_path / "home", text)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *to: sent.append(to))
    assert publish_access(home) is False
    assert sent == []


def test_a_stranger_with_the_process_id_of_a_broker_that_was_killed_survives(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """The next broker holds the lock already and has not written its own process id yet."""
    home = make_home(tmp_path / "home")
    path = home.broker / PID_NAME
    path.write_text(f"{stranger.pid}\n")
    with path.open("r+") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        assert publish_access(home) is False
    assert_got_no_sighup(stranger)


@pytest.mark.broker
def test_a_broker_that_gets_sighup_while_it_starts_starts(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    path, log = home.broker / PID_NAME, tmp_path / "log"
    with log.open("wb") as output:
        broker = subprocess.Popen(
            [sys.executable, "-m", "fedcg", "broker", "run", "--dir", str(home.root)], stdout=output, stderr=output
        )

    def has_begun() -> bool:
        return path.exists() and path.read_text().strip() == str(broker.pid)

    def is_ready() -> bool:
        broker.send_signal(signal.SIGHUP)
        return b"ready" in log.read_bytes() or broker.poll() is not None

    try:
        wait_until(has_begun, "the broker has written its process id", 30)
        wait_until(is_ready, "the broker is ready", 30)
        assert publish_access(home) is True
        broker.terminate()
        assert broker.wait(timeout=20) == 0, log.read_text()
    finally:
        broker.kill()
        broker.wait()


def test_lists_that_can_not_be_written_are_an_error_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is revoked would stay on the broker's lists, and nobody would know."""
    monkeypatch.setattr(own_broker, "ACCOUNT", "no-such-user")
    home = make_home(tmp_path / "home")
    refresh_access(home)
    deploy(home, tmp_path / "config")
    (tmp_path / "config" / "acl").unlink()
    (tmp_path / "config" / "acl").mkdir()
    with pytest.raises(BrokerError, match=r"config.*Give that folder to the user"):
        publish_access(home)
    shutil.rmtree(tmp_path / "config")  # a folder that is gone is no broker's any more
    assert publish_access(home) is False
