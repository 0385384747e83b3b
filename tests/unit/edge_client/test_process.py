"""The agent as a process of its own: no torch inside, an orderly end, one agent per store."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcg.errors import ALREADY_RUNNING
from fedcg.event_log import read_events
from fedcg.wire.messages.signing import SigningKey
from tests.support.edge.world import write_device
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
    assert (tmp_path / "store" / "signing.pub").read_text() == f"{key}\n", (
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
