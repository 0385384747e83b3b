"""A device's `fedcg doctor` and `fedcg agent status` beside a real broker and a real coordinator."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import data_of
from tests.support.stack import Stack, write_images

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(240)]
DEVICE = "site-1"


class Patient(Stack):
    """One whose federation is not paused by a device that declines again and again."""

    def plan(self) -> str:
        return f"max_attempts = 10000\n{super().plan()}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Patient(tmp_path_factory.mktemp("stack"), devices=(DEVICE, "site-2"), method="fedsplit", broker="mosquitto")
    made.params, made.rounds, made.min_clients = {"epochs": 1}, 1, 1
    with made.up():
        yield made


def status(stack: Stack, device: str = DEVICE) -> dict[str, Any]:
    shown: dict[str, Any] = data_of(stack.command("agent", "status", "--config", str(stack.config(device)), "--json"))
    return shown


def access_list(stack: Stack) -> Path:
    return next(path for path in (stack.home / "broker").iterdir() if path.name == "acl")


def test_the_doctor_is_green_for_a_member_and_red_for_one_outside_the_access_list_or_revoked(stack: Stack) -> None:
    assert stack.doctor("site-2")["coordinator"]["state"] == "ok"
    acl = access_list(stack)
    whole = acl.read_text()
    start = whole.index("user site-2")
    acl.write_text(whole[:start])
    stack.running["broker"].send_signal(signal.SIGHUP)
    missing = stack.doctor("site-2")["coordinator"]  # by the time it connects, the broker has read the list
    assert missing["state"] == "failed"
    assert "missing in the broker's access list" in missing["detail"]
    stack.command("device", "revoke", "site-2", "--dir", str(stack.home))
    revoked = stack.doctor("site-2")["coordinator"]
    assert revoked["state"] == "failed"
    assert "revoked" in revoked["detail"]
    assert "fedcg device show site-2" in revoked["advice"]
    stack.start_agent("site-2")
    stack.wait_event("site-2", lambda event: event["event"] == "link_problem", "the refusal")
    assert "revoked" in status(stack, "site-2")["link_problem"]
    assert stack.doctor("site-2")["coordinator"]["detail"].startswith("the agent runs, without an answer: ")
    stack.kill("site-2")


def test_a_class_that_the_spec_does_not_have_is_reported_then_the_device_finishes_and_reports_it(stack: Stack) -> None:
    write_images(stack.root / "dog", 1, seed=1)
    dog = stack.root / "data" / DEVICE / "train" / "dog"
    (stack.root / "dog" / "cross").rename(dog)
    stack.start_agent(DEVICE)
    stack.wait_event(DEVICE, lambda event: event["event"] == "declined", "the decline")
    assert "no_data" in status(stack)["last_declined"]
    assert "the spec has no class 'dog'" in status(stack)["last_declined"]
    assert "the spec has no class 'dog'" in stack.tail(DEVICE)
    assert stack.doctor(DEVICE)["coordinator"]["detail"] == "the agent runs, and the coordinator answered it"
    assert len([event for event in stack.events(DEVICE) if event["event"] == "link"]) == 1  # not disturbed
    for path in dog.iterdir():
        path.unlink()
    dog.rmdir()
    stack.devices = (DEVICE,)
    stack.wait_finished()
    assert str(status(stack)["finished"]).startswith("finished; no exported model, accuracy ")
    assert "finished; no exported model, accuracy " in stack.tail(DEVICE)
    assert "Traceback" not in stack.tail(DEVICE)
