"""What a service manager gets of an agent: ready, signs of life and status while the loop turns, stopping at the end."""

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.agent.reports import ServiceManager
from tests.support.edge.world import MakeWorld


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        yield listener


def received(manager: socket.socket) -> str:
    return manager.recv(4096).decode()


def nothing_more(manager: socket.socket) -> bool:
    return not select.select([manager], [], [], 0)[0]


def test_signs_of_life_come_three_times_within_the_limit_and_the_status_when_it_changes(
    manager: socket.socket, tmp_path: Path
) -> None:
    now = 0.0
    service = ServiceManager(
        {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())},
        lambda: now,
    )
    service.ready()
    assert received(manager) == "READY=1"
    service.alive("waits for a round")
    assert received(manager) == "STATUS=waits for a round\nWATCHDOG=1"
    now = 9.9
    service.alive("waits for a round")
    assert nothing_more(manager)
    now = 10.0
    service.alive("waits for a round")
    assert received(manager) == "WATCHDOG=1"
    service.alive("line\nbreak")
    assert received(manager) == "STATUS=line break"


@pytest.mark.parametrize(
    "environment", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}]
)
def test_no_sign_of_life_without_a_watchdog_of_this_process(
    manager: socket.socket, tmp_path: Path, environment: dict[str, str]
) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), **environment}, lambda: 0.0)
    service.alive("trains")
    assert received(manager) == "STATUS=trains"


def test_an_abstract_address_is_reached_and_a_manager_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0fedcg-test-notify")
        listener.settimeout(10)
        ServiceManager({"NOTIFY_SOCKET": "@fedcg-test-notify"}, lambda: 0.0).stopping()
        assert listener.recv(100) == b"STOPPING=1"
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        ServiceManager(environment, lambda: 0.0).ready()


def test_an_agent_reports_from_its_start_to_its_end(
    manager: socket.socket, tmp_path: Path, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    world = make_world()
    world.connect()
    assert received(manager) == "READY=1"
    seen = [received(manager) for _ in range(3)]
    assert "STATUS=waits for a round" in seen[0]
    assert all("WATCHDOG=1" in one for one in seen)
    world.agent.stop()
    while (last := received(manager)) != "STOPPING=1":
        assert "WATCHDOG=1" in last
