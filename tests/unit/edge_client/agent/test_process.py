"""The agent as a process of its own: no torch inside, an orderly end, one agent per store, and what a service manager gets of it."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_client.agent.reports import ServiceManager
from edge_client.store.private_store import PrivateStore
from fedcg.errors import ALREADY_RUNNING
from fedcg.event_log import read_events
from fedcg.files import write_durably
from fedcg.wire.messages.envelopes import SigningKey
from tests.support.edge.world import DEVICE, FEDERATION, MakeWorld, connected, write_device
from tests.support.traps import imported_in, lay_traps
from tests.support.waiting import free_port, wait_until

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `fedcg agent run` for one device whose broker does not answer, among modules with the names of what it imports."""
    config = write_device(tmp_path, port=free_port())
    command = [str(Path(sys.executable).with_name("fedcg")), "agent", "run", "--config", str(config)]
    started: list[subprocess.Popen[str]] = []
    lay_traps(tmp_path)

    def run() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_an_agent_that_makes_a_damaged_file_anew_names_it_in_its_log(start: Start, tmp_path: Path) -> None:
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE)
    write_durably(store.root / "accepted.json", b"{")
    agent, log = start(), store.root / "events.jsonl"
    wait_until(lambda: any(event["event"] == "refused" for event in read_events(log)), "the damage is reported", 30)
    refused = next(event for event in read_events(log) if event["event"] == "refused")
    assert str(refused["detail"]).startswith(f"{store.root}/accepted.json is damaged. It holds only the list of images")
    assert agent.poll() is None


@pytest.mark.slow
def test_the_agent_holds_no_torch_while_its_trainer_does_and_both_end_in_order(start: Start, tmp_path: Path) -> None:
    agent = start()
    log = tmp_path / "store" / "events.jsonl"
    wait_until(lambda: any(event["event"] == "plan" for event in read_events(log)), "the trainer has loaded torch", 60)
    trainer = next(int(str(event["pid"])) for event in read_events(log) if event["event"] == "trainer_started")
    assert "libtorch" in libraries(trainer)
    assert "libtorch" not in libraries(agent.pid)
    assert imported_in(tmp_path) == ""
    key = SigningKey.load(tmp_path / "signing.key").public.hex
    assert (tmp_path / "store" / "signing.pub").read_text().endswith(f"\n{key}\n"), (
        "whoever predicts with its models can check them"
    )
    second = start()
    _, errors = second.communicate(timeout=60)
    assert second.returncode == ALREADY_RUNNING
    assert f"store/lock is held by process {agent.pid}," in errors
    agent.send_signal(signal.SIGTERM)
    _, errors = agent.communicate(timeout=20)
    assert agent.returncode == 0, errors
    assert not Path(f"/proc/{trainer}").exists()
    assert [event["event"] for event in read_events(log)][-1] == "agent_stopped"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        yield listener


def received(manager: socket.socket) -> str:
    return manager.recv(4096).decode()


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
    service.alive("waiting for a round")
    assert received(manager) == "STATUS=waiting for a round\nWATCHDOG=1"
    now = 9.9
    service.alive("waiting for a round")
    assert not select.select([manager], [], [], 0)[0]  # nothing more
    now = 10.0
    service.alive("waiting for a round")
    assert received(manager) == "WATCHDOG=1"
    service.alive("line\nbreak")
    assert received(manager) == "STATUS=line break"


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
    world = connected(make_world)
    assert received(manager) == "READY=1"
    seen = [received(manager) for _ in range(3)]
    assert "STATUS=waiting for a round" in seen[0]
    assert all("WATCHDOG=1" in one for one in seen)
    world.agent.stop()
    while (last := received(manager)) != "STOPPING=1":
        assert "WATCHDOG=1" in last


@pytest.mark.parametrize(
    "environment", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}]
)
def test_no_sign_of_life_without_a_watchdog_of_this_process(
    manager: socket.socket, tmp_path: Path, environment: dict[str, str]
) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), **environment}, lambda: 0.0).alive("trains")
    assert received(manager) == "STATUS=trains"
