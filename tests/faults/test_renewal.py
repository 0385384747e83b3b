"""An agent outlives its first certificate: it renews, and the broker takes it back after a restart, with no round lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fedcg.wire.enrolment import load_certificate
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

LIFE_S = 45.0
PARAMS = {"epochs": 2, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    made = Stack(
        root=tmp_path,
        params=PARAMS,
        rounds=2,
        devices=("site-1", "site-2"),
        enrol=True,
        certificate_days=LIFE_S / 86_400,
        broker="mosquitto",
    )
    made.prepare()
    made.start_broker()
    made.start_coordinator()
    made.wait_event("coordinator", lambda event: event["event"] == "link" and event["up"], "the coordinator is up")
    yield made
    made.stop()


def certificate_end(stack: Stack, device: str) -> float:
    path = stack.config(device).parent / "tls" / "device.pem"
    return load_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def test_a_round_is_finished_after_the_first_certificates_have_expired(stack: Stack) -> None:
    """Only one box runs at first, so the round can't open before its certificate is of the second generation."""
    stack.enrol_device("site-1")
    first_end = certificate_end(stack, "site-1")
    stack.start_agent("site-1")
    stack.wait_event("site-1", lambda event: event["event"] == "welcomed", "it is welcomed")
    wait_for(lambda: time.time() > first_end, "its first certificate expires", LIFE_S + 30)
    assert any(event["event"] == "certificate_renewed" for event in stack.events("site-1"))
    assert certificate_end(stack, "site-1") > first_end
    links = [event["up"] for event in stack.events("site-1") if event["event"] == "link"]
    assert links[:3] == [True, False, True]

    stack.kill("broker")
    (stack.root / "broker.log").unlink()
    stack.start_broker()
    stack.enrol_device("site-2")
    stack.start_agent("site-2")
    stack.wait_finished()
    closed = [event["clients"] for event in stack.events("coordinator") if event["event"] == "distilling"]
    assert closed == [["site-1", "site-2"]] * 2
    assert not any(event["event"] == "attempt_failed" for event in stack.events("coordinator"))
