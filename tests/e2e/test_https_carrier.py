"""A federation by its commands in which one box enrols and switches to HTTPS: real learning, the same final aggregate bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import Stack

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

PARAMS = {"epochs": 1, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}
BOX = "site-1"


def run(stack: Stack) -> str:
    """To the end; returns the sha256 of the final aggregate."""
    with stack.up():
        for device in stack.devices:
            stack.enrol_device(device)
        if stack.https:
            found = stack.doctor(BOX)["carrier"]
            assert found["state"] == "ok"
            assert f"https://127.0.0.1:{stack.carrier_port} answers" in found["detail"]
        for device in stack.devices:
            stack.start_agent(device)
        stack.wait_finished()
        return stack.final_aggregate()


def test_a_box_on_https_changes_no_bit_of_what_is_learned(tmp_path: Path) -> None:
    mixed = Stack(root=tmp_path / "mixed", params=PARAMS, enrol=True, https=(BOX,))
    alike = Stack(root=tmp_path / "alike", params=PARAMS, enrol=True)
    assert run(mixed) == run(alike)
    carried = [event for event in mixed.events(BOX) if event["event"] == "carrier"]
    assert {event["way"] for event in carried if event["works"]} == {"up", "down"}
    assert not any(event["event"] == "carrier" for event in mixed.events("site-2"))
    stored = [event["client"] for event in mixed.events("coordinator") if event["event"] == "update_stored"]
    assert sorted(stored) == sorted(2 * mixed.devices)
