"""Boxes that enrol by token with a real coordinator, learn together, and one that is revoked while a round is open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

PARAMS = {"epochs": 4, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}
THIEF = "site-3"


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    made = Stack(root=tmp_path, params=PARAMS, rounds=2, min_clients=2, enrol=True, broker="mosquitto")
    with made.up():
        yield made


def test_boxes_enrol_learn_and_go_on_without_one_that_is_revoked_in_an_open_round(stack: Stack) -> None:
    for device in stack.devices:
        stack.enrol_device(device)
    found = stack.doctor(THIEF)
    assert {check: found[check]["state"] for check in ("keys", "certificate", "broker", "data")} == dict.fromkeys(
        ("keys", "certificate", "broker", "data"), "ok"
    )
    # The first round may open with two; the second opens with all three, and one of them is revoked in it.
    for device in stack.devices:
        stack.start_agent(device)
    stack.wait_event(
        "coordinator",
        lambda event: event["event"] == "attempt_opened" and event["round"] == 2 and THIEF in event["participants"],
        "round 2 opens with all three",
    )
    stack.kill(THIEF)
    revoked = stack.command("device", "revoke", THIEF, "--dir", str(stack.home), "--reason", "stolen", "--json")
    assert json.loads(revoked)["broker_reloaded"] is True
    stack.start_agent(THIEF)
    wait_for(lambda: stack.tail(THIEF).count("hung up before answering") >= 2, "the broker turned the revoked box away")
    stack.devices = ("site-1", "site-2")
    stack.wait_finished()
    events = stack.events("coordinator")
    assert [event["client"] for event in events if event["event"] == "departed"] == [THIEF]
    closed = [event for event in events if event["event"] == "distilling"]
    assert closed[-1]["clients"] == ["site-1", "site-2"]
    assert not any(event["event"] == "attempt_failed" for event in events)
    starts = [event["t"] for event in stack.events(THIEF) if event["event"] == "agent_started"]
    assert len(starts) == 2
    after = [event for event in stack.events(THIEF) if event["t"] >= starts[-1]]
    assert not any(event["event"] in ("welcomed", "invited", "link") for event in after)
    listed = json.loads(stack.command("device", "list", "--dir", str(stack.home), "--json"))
    assert {device["id"]: device["state"] for device in listed} == {
        "site-1": "enrolled",
        "site-2": "enrolled",
        THIEF: "revoked",
    }
