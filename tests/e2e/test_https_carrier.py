"""A federation by its commands in which one box enrols and switches to HTTPS: real learning, the same final aggregate bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

PARAMS = {"epochs": 1, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}
BOX = "site-1"


def doctor(stack: Stack, device: str) -> dict[str, Any]:
    """What `fedcg doctor` says of the device's carrier."""
    done = subprocess.run(
        [sys.executable, "-m", "fedcg", "doctor", "--config", str(stack.config(device)), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return next(finding for finding in findings if finding["check"] == "carrier")


def run(stack: Stack) -> str:
    """To the end; returns the sha256 of the final aggregate."""
    try:
        stack.prepare()
        stack.start_broker()
        stack.start_coordinator()
        stack.wait_event("coordinator", lambda event: event["event"] == "link" and event["up"], "the coordinator is up")
        for device in stack.devices:
            stack.enrol_device(device)
        if stack.https:
            found = doctor(stack, BOX)
            assert found["state"] == "ok"
            assert f"https://127.0.0.1:{stack.carrier_port} answers" in found["detail"]
        for device in stack.devices:
            stack.start_agent(device)
        stack.wait_finished()
        return stack.final_aggregate()
    finally:
        stack.stop()


def test_a_box_on_https_changes_no_bit_of_what_is_learned(tmp_path: Path) -> None:
    mixed = Stack(root=tmp_path / "mixed", params=PARAMS, enrol=True, https=(BOX,))
    alike = Stack(root=tmp_path / "alike", params=PARAMS, enrol=True)
    assert run(mixed) == run(alike)
    carried = [event for event in mixed.events(BOX) if event["event"] == "carrier"]
    assert {event["way"] for event in carried if event["works"]} == {"up", "down"}
    assert not any(event["event"] == "carrier" for event in mixed.events("site-2"))
    stored = [event["client"] for event in mixed.events("coordinator") if event["event"] == "update_stored"]
    assert sorted(stored) == sorted(2 * mixed.devices)
