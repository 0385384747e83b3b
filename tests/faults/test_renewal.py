"""An agent outlives its first certificate: it renews, and the broker takes it back after a restart, with no round lost."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedcg.wire.messages.enrolment_messages import load_certificate
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

LIFE_S = 30.0
PARAMS = {"epochs": 6, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}


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


def open_rounds(stack: Stack) -> list[tuple[float, float]]:
    """From when to when each round collected updates."""
    events = stack.events("coordinator")
    begun, ended = (
        [event["t"] for event in events if event["event"] == name] for name in ("attempt_opened", "distilling")
    )
    return list(zip(begun, ended, strict=True))


def is_renewal(event: dict[str, Any], *, after: float) -> bool:
    return bool(event["event"] == "certificate_renewed" and event["t"] > after)


def test_rounds_survive_renewals_and_the_end_of_the_first_certificates(stack: Stack) -> None:
    """One box runs alone first, so the round can't open before its certificate is of the second generation."""
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
    training = stack.wait_event("site-2", lambda event: event["event"] == "phase_started", "site-2 trains")
    os.kill(training["pid"], signal.SIGSTOP)  # the round stays open until both boxes have renewed
    try:
        for device in stack.devices:
            stack.wait_event(device, partial(is_renewal, after=training["t"]), f"{device} renews", LIFE_S + 30)
    finally:
        os.kill(training["pid"], signal.SIGCONT)
    stack.wait_finished()
    opened, closed_at = open_rounds(stack)[0]
    for device in stack.devices:
        within = [event for event in stack.events(device) if is_renewal(event, after=opened) and event["t"] < closed_at]
        assert within, f"{device} renewed while the round was open"
    closed = [event["clients"] for event in stack.events("coordinator") if event["event"] == "distilling"]
    assert closed == [["site-1", "site-2"]] * 2
    assert not any(event["event"] == "attempt_failed" for event in stack.events("coordinator"))
