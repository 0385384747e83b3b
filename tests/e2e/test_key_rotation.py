"""The coordinator's key is replaced twice in the middle of a federation while a box is off, another is killed, and so is the coordinator."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.envelopes import VerifyKey
from tests.support.commands import data_of
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
AWAY, KILLED = "site-3", "site-2"


def is_rotated(serial: int) -> Any:
    return lambda event: event["event"] == "key_rotated" and event["serial"] == serial


def has_followed(serial: int) -> Any:
    return lambda event: event["event"] == "coordinator_key" and event["serial"] == serial


def rotate(stack: Stack) -> str:
    return str(data_of(stack.command("coordinator", "rotate-key", "--dir", str(stack.home), "--json"))["key"])


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    params = {"epochs": 2, "server_iterations": 100, "server_batch": 16}
    made = Stack(root=tmp_path, params=params, rounds=3, broker="mosquitto")
    with made.up(agents=True, observer=()):
        yield made


def test_all_boxes_follow_two_rotations_and_the_aggregate_is_counted_from_all(stack: Stack) -> None:
    stack.wait_event("coordinator", lambda event: event["event"] == "attempt_opened" and event["round"] == 2, "round 2")
    stack.kill(AWAY)
    rotate(stack)
    stack.wait_event("coordinator", is_rotated(1), "the running coordinator takes the new key")
    for device in ("site-1", KILLED):
        stack.wait_event(device, has_followed(1), f"{device} follows")
    stack.kill(KILLED)
    newest = rotate(stack)
    stack.kill("coordinator")  # before or after it has seen the second key, as it comes
    stack.start_coordinator()
    stack.start_agent(KILLED)
    stack.wait_event("site-1", has_followed(2), "site-1 follows again")
    stack.start_agent(AWAY)
    stack.wait_finished()

    merged = [event["clients"] for event in stack.events("coordinator") if event["event"] == "distilling"]
    assert merged == [list(stack.devices)] * 3
    assert {event["attempt"] for event in stack.events("coordinator") if event["event"] == "attempt_opened"} == {1}
    for device in stack.devices:
        enrolled = VerifyKey.load_all(stack.config(device).parent / "coordinator.pub")[0]
        pinned = PrivateStore(stack.store(device)).pinned_key(enrolled)
        assert (pinned.key.hex, pinned.serial) == (newest, 2), device
        assert [event for event in stack.events(device) if event["event"] == "refused"] == [], device
    followed = [event["serial"] for event in stack.events(AWAY) if event["event"] == "coordinator_key"]
    assert followed == [2]  # both links at once
    seen = stack.root / "wire" / "wire.json"
    wait_for(lambda: json.loads(seen.read_text())["coordinator_keys"].get("2") == newest, "the observer has both keys")
    assert json.loads(seen.read_text())["key_problems"] == []


def problems(stack: Stack) -> dict[str, dict[str, Any]]:
    values = data_of(stack.command("coordinator", "status", "--dir", str(stack.home), "--json"))
    return {each["kind"]: each for each in values["problems"]}


def test_a_backup_from_before_a_rotation_is_named_for_what_it_is_and_its_remedy_brings_the_boxes_back(
    tmp_path: Path,
) -> None:
    stack = Stack(root=tmp_path, min_clients=9)  # nothing is learnt here
    words = ("--passphrase-file", str(tmp_path / "passphrase"))
    (tmp_path / "passphrase").write_text("correct horse battery\n")
    with stack.up(agents=True):
        for device in stack.devices:
            stack.wait_event(device, lambda event: event["event"] == "welcomed", f"{device} is welcomed")
        stack.command("coordinator", "backup", "--out", str(tmp_path / "backup"), "--dir", str(stack.home), *words)
        rotate(stack)
        for device in stack.devices:
            stack.wait_event(device, has_followed(1), f"{device} follows")
        stack.kill("coordinator")
        stack.kill("broker")
        old, stack.home_name = stack.home, "restored"
        stack.command("coordinator", "restore", str(tmp_path / "backup"), "--dir", str(stack.home), *words)
        stack.start_broker()
        stack.start_coordinator()
        wait_for(lambda: "older message key" in problems(stack), "the restored coordinator names its key")
        found = problems(stack)
        assert "devices are ahead" not in found
        assert all(step in found["older message key"]["remedy"] for step in ("signing-N.key", "rotate-key"))
        before = {device: len(welcomes(stack, device)) for device in stack.devices}
        shutil.copy(old / "signing-1.key", stack.home)
        rotate(stack)
        for device in stack.devices:
            wait_for(lambda: len(welcomes(stack, device)) > before[device], f"{device} is back")  # noqa: B023
        wait_for(lambda: "older message key" not in problems(stack), "the problem is over")


def welcomes(stack: Stack, device: str) -> list[dict[str, Any]]:
    return [event for event in stack.events(device) if event["event"] == "welcomed"]
