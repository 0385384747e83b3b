"""A broken box is replaced by another, and a box leaves for good: with a real coordinator, broker, and agents as processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcg.errors import ALREADY_RUNNING
from fedcg.wire.messages.enrolment_messages import load_certificate
from tests.support.commands import data_of, run_fedcg
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280), pytest.mark.slow]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Nothing is learnt here: a round would need more devices than there are."""
    root = tmp_path_factory.mktemp("plant")
    made = Stack(root=root, devices=("site-1", "site-2", "site-3"), min_clients=9, enrol=True, broker="mosquitto")
    with made.up():
        yield made


def devices(stack: Stack) -> dict[str, dict[str, Any]]:
    listed = data_of(stack.command("device", "list", "--dir", str(stack.home), "--json"))
    return {device["id"]: device for device in listed}


def welcomes(stack: Stack, device: str) -> int:
    return sum(event["event"] == "welcomed" for event in stack.events(device))


def test_a_new_box_takes_the_place_of_one_that_still_runs_and_that_one_is_cut_off(stack: Stack) -> None:
    old = stack.enrol_device("site-1")
    stack.start_agent("site-1")
    stack.wait_event("site-1", lambda event: event["event"] == "welcomed", "the old box is welcomed")
    old_key = devices(stack)["site-1"]["public_key"]
    old_certificate = load_certificate((old / "tls" / "device.pem").read_bytes())

    new = stack.enrol_device("site-1", "--replaces", "site-1", folder=stack.root / "new" / "site-1")
    stack.wait_event("site-1", lambda event: event["event"] == "link" and not event["up"], "the old box loses its link")
    stack.wait_event("coordinator", lambda event: event["event"] == "departed", "its key counts no more")
    shown = data_of(stack.command("device", "show", "site-1", "--dir", str(stack.home), "--json"))
    assert shown["state"] == "enrolled"
    assert shown["public_key"] != old_key
    revoked = {entry["serial"] for entry in shown["certificates"] if entry["revoked_at"] is not None}
    assert revoked == {f"{old_certificate.serial_number:x}"}

    before = welcomes(stack, "site-1")
    stack.start("new", "agent", "run", "--config", str(new / "agent.toml"))
    wait_for(lambda: '"welcomed"' in read(new / "store" / "events.jsonl"), "the new box is welcomed", 60)
    assert welcomes(stack, "site-1") == before
    links = [event["up"] for event in stack.events("site-1") if event["event"] == "link"]
    assert links[-1] is False
    assert links.count(True) == 1


def test_a_box_that_is_revoked_while_it_runs_is_told_says_so_once_and_backs_off(stack: Stack) -> None:
    config = str(stack.enrol_device("site-3") / "agent.toml")
    stack.start_agent("site-3")
    stack.wait_event("site-3", lambda event: event["event"] == "welcomed", "it is welcomed")
    stack.command("device", "revoke", "site-3", "--reason", "stolen", "--dir", str(stack.home))
    assert stack.running.pop("site-3").wait(timeout=60) == 4  # it was to run until the end
    stack.start("again", "agent", "run", "--config", config)  # its certificate is refused: no hello, no statement
    refused = "starts anew, tries once, and has no link"
    wait_for(lambda: [event["event"] for event in stack.events("site-3")].count("revoked") == 2, refused, 60)
    shown = run_fedcg("agent", "status", "--config", config, "--json")
    assert shown.exit_code == 4
    assert "the coordinator has revoked this device" in data_of(shown.stdout)["revoked"]
    found = stack.doctor("site-3")["coordinator"]
    assert (found["state"], found["detail"]) == ("failed", "it has revoked this device")
    stack.running["again"].terminate()
    assert stack.running.pop("again").wait(timeout=30) == 4
    log = stack.tail("site-3") + stack.tail("again")
    assert log.count("[warning") <= 4, log  # that it is revoked, twice, that a publish is refused and the link lost
    assert log.count("[error") == 0, log
    assert log.count("the coordinator has revoked this device") == 2


def test_a_box_that_leaves_is_no_member_any_more_and_nothing_private_stays_on_it(stack: Stack) -> None:
    box = stack.enrol_device("site-2")
    stack.start_agent("site-2")
    stack.wait_event("site-2", lambda event: event["event"] == "welcomed", "it is welcomed")
    config = str(box / "agent.toml")
    busy = subprocess.run(
        [sys.executable, "-m", "fedcg", "agent", "leave", "--config", config, "--erase", "--yes"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert busy.returncode == ALREADY_RUNNING
    assert "is held by process" in busy.stderr
    stack.running["site-2"].terminate()
    assert stack.running.pop("site-2").wait(timeout=30) == 0

    answer = data_of(stack.command("agent", "leave", "--config", config, "--erase", "--yes", "--json"))
    assert answer["confirmed"] is True
    assert {path.name for path in box.iterdir() if path.is_file()} == {"agent.toml"}
    assert not (box / "store").exists()
    assert list((box / "tls").iterdir()) == []
    assert (stack.root / "data" / "site-2" / "train").is_dir()
    assert devices(stack)["site-2"]["state"] == "left"
    wait_for(
        lambda: "user site-2" not in (stack.home / "broker" / "acl").read_text(), "the broker's list forgets it", 30
    )
    stack.wait_event(
        "coordinator", lambda event: event["event"] == "left" and event["client"] == "site-2", "it is logged"
    )


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
