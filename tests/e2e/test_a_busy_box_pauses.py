"""A device whose application holds its lock file: it declines with that reason, pauses in the middle of a round, and goes on when it is free."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(240)]
DEVICE = "site-1"


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """The lock as the box's own application holds it."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ask(stack: Stack, path: str) -> Any:
    token = (stack.home / "api.token").read_text().strip()
    address = f"http://127.0.0.1:{stack.api_port}/api/v1/{path}"
    with urlopen(Request(address, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
        return json.load(answer)


def reported_phase(stack: Stack) -> str | None:
    """What the device's last heartbeat says that its training process does."""
    found = next(one for one in ask(stack, "devices") if one["id"] == DEVICE)["progress"].get("shapes")
    return None if found is None else str(found["phase"])


def events(stack: Stack, name: str, who: str = DEVICE) -> list[dict[str, Any]]:
    return [event for event in stack.events(who) if event["event"] == name]


def test_a_box_whose_application_is_busy_declines_then_trains_and_pauses_while_it_is_busy_again(tmp_path: Path) -> None:
    stack = Stack(tmp_path, devices=(DEVICE,), method="fedsplit", params={"epochs": 400}, rounds=1)
    lock, metrics = tmp_path / "app.lock", tmp_path / f"fedcg-shapes-{DEVICE}.prom"
    with stack.up():
        changes = {("eligibility", "lock_file"): str(lock), ("", "metrics_folder"): str(tmp_path)}
        set_values(stack.config(DEVICE), {**changes, ("broker", "keepalive_s"): 5, ("policy", "max_epochs"): 400})
        with held(lock):
            stack.start_agent(DEVICE)
            stack.wait_event(DEVICE, lambda event: event["event"] == "declined", "the decline")
            assert events(stack, "declined")[0]["reason"] == "reserved"
            assert str(lock) in events(stack, "declined")[0]["detail"]
            stack.wait_event("coordinator", lambda event: event["event"] == "declined", "the coordinator's line")
            assert ask(stack, "federations/shapes/now")["clients"][0]["reason"] == "reserved"
            wait_for(metrics.exists, "the metrics", 30)
            assert 'reason="reserved"} 0' in metrics.read_text()
        stack.wait_event(DEVICE, lambda event: event.get("phase") == "classify", "training, after a reminder")
        with held(lock):
            stack.wait_event(DEVICE, lambda event: event["event"] == "paused", "the pause")
            steps = len(events(stack, "progress"))
            status = data_of(stack.command("agent", "status", "--config", str(stack.config(DEVICE)), "--json"))
            assert "paused" in status["training"]
            wait_for(lambda: reported_phase(stack) == "wait", "a heartbeat during the pause", 30)
            assert len(events(stack, "progress")) == steps
            assert not events(stack, "committed")
            assert not events(stack, "offline", "coordinator")
        stack.wait_event(DEVICE, lambda event: event["event"] == "resumed", "the end of the pause")
        stack.wait_finished()
    assert len(events(stack, "declined")) == 1
    assert not events(stack, "attempt_failed", "coordinator")
    assert events(stack, "paused")[0]["reason"] == "reserved"
