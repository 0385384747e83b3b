"""Devices and the keys of their coordinator, with a real broker and agents as processes.

Boxes are replaced, revoked and leave; the message key is rotated; a coordinator goes back to a backup.
"""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.errors import ALREADY_RUNNING
from fedcg.wire.messages.enrolment_messages import load_certificate
from fedcg.wire.messages.envelopes import VerifyKey
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
AWAY, KILLED = "site-3", "site-2"
HEARTBEAT_S = 5
PROMPT_S = 25.0  # a heartbeat, and the restored coordinator's start on a busy machine


def devices(stack: Stack) -> dict[str, dict[str, Any]]:
    listed = data_of(stack.command("device", "list", "--dir", str(stack.home), "--json"))
    return {device["id"]: device for device in listed}


def welcomes(stack: Stack, device: str) -> int:
    return sum(event["event"] == "welcomed" for event in stack.events(device))


def start_box(stack: Stack, device: str) -> Path:
    """Enrol a box and start its agent, until it is welcomed; returns its folder."""
    folder = stack.enrol_device(device)
    set_values(stack.config(device), {("broker", "keepalive_s"): HEARTBEAT_S})
    stack.start_agent(device)
    stack.wait_event(device, lambda event: event["event"] == "welcomed", f"{device} is welcomed")
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Nothing is learnt here: a round would need more devices than there are."""
    made = Stack(root=tmp_path_factory.mktemp("plant"), min_clients=9, enrol=True)
    with made.up():
        yield made


def test_a_new_box_takes_the_place_of_one_that_still_runs_and_that_one_is_cut_off(stack: Stack) -> None:
    old = start_box(stack, "site-1")
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
    assert (links[-1], links.count(True)) == (False, 1)


def test_a_box_that_is_revoked_while_it_runs_is_told_says_so_once_and_backs_off(stack: Stack) -> None:
    config = str(start_box(stack, "site-3") / "agent.toml")
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
    box = start_box(stack, "site-2")
    config = str(box / "agent.toml")
    leaving = ("agent", "leave", "--config", config, "--erase", "--yes")
    assert "is held by process" in fails(ALREADY_RUNNING, *leaving)
    stack.running["site-2"].terminate()
    assert stack.running.pop("site-2").wait(timeout=30) == 0
    assert stack.doctor("site-2")["coordinator"]["state"] == "ok"
    acl = stack.home / "broker" / "acl"
    whole = acl.read_text()
    acl.write_text(whole[: whole.index("user site-2")])
    stack.running["broker"].send_signal(signal.SIGHUP)
    missing = stack.doctor("site-2")["coordinator"]  # by the time it connects, the broker has read the list
    assert missing["state"] == "failed"
    assert "missing in the broker's access list" in missing["detail"]
    acl.write_text(whole)
    stack.running["broker"].send_signal(signal.SIGHUP)

    answer = data_of(stack.command(*leaving, "--json"))
    assert answer["confirmed"] is True
    assert {path.name for path in box.iterdir() if path.is_file()} == {"agent.toml"}
    assert not (box / "store").exists()
    assert list((box / "tls").iterdir()) == []
    assert (stack.root / "data" / "site-2" / "train").is_dir()
    assert devices(stack)["site-2"]["state"] == "left"
    wait_for(lambda: "user site-2" not in acl.read_text(), "the broker's list forgets it", 30)
    stack.wait_event(
        "coordinator", lambda event: event["event"] == "left" and event["client"] == "site-2", "it is logged"
    )


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def has_followed(serial: int) -> Any:
    return lambda event: event["event"] == "coordinator_key" and event["serial"] == serial


def rotate(stack: Stack) -> str:
    return str(data_of(stack.command("coordinator", "rotate-key", "--dir", str(stack.home), "--json"))["key"])


def test_all_boxes_follow_two_rotations_and_the_aggregate_is_counted_from_all(tmp_path: Path) -> None:
    stack = Stack(root=tmp_path, params={"epochs": 2, "server_iterations": 100, "server_batch": 16}, rounds=3)
    with stack.up(agents=True, observer=()):
        stack.wait_event(
            "coordinator", lambda event: event["event"] == "attempt_opened" and event["round"] == 2, "round 2"
        )
        stack.kill(AWAY)
        rotate(stack)
        stack.wait_event(
            "coordinator",
            lambda event: (event["event"], event.get("serial")) == ("key_rotated", 1),
            "it takes the new key",
        )
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
        wait_for(
            lambda: json.loads(seen.read_text())["coordinator_keys"].get("2") == newest, "the observer has both keys"
        )
        assert json.loads(seen.read_text())["key_problems"] == []


def status(stack: Stack, device: str) -> dict[str, Any]:
    return dict(data_of(stack.command("agent", "status", "--config", str(stack.config(device)), "--json")))


def online(stack: Stack) -> list[str]:
    return sorted(name for name, device in devices(stack).items() if device["online"])


def problems(stack: Stack) -> dict[str, str]:
    """The coordinator's open problems with their remedies."""
    values = data_of(stack.command("coordinator", "status", "--dir", str(stack.home), "--json"))
    return {each["kind"]: each["remedy"] for each in values["problems"]}


def test_boxes_report_the_session_that_they_really_have_while_a_coordinator_goes_back_and_forth_and_behind_a_rotation(
    tmp_path: Path,
) -> None:
    stack = Stack(root=tmp_path, devices=("site-1", "site-2"), min_clients=9, enrol=True)  # nothing is learnt
    words = ("--passphrase-file", str(tmp_path / "passphrase"))

    def enrol(device: str, backup: Path) -> None:
        start_box(stack, device)
        stack.command("coordinator", "backup", "--out", str(backup), "--dir", str(stack.home), *words)

    def restore(backup: Path, name: str) -> None:
        stack.kill("coordinator")
        stack.home_name = name
        stack.command("coordinator", "restore", str(backup), "--dir", str(stack.home), *words)
        stack.start_coordinator()

    stack.prepare()
    (tmp_path / "passphrase").write_text("correct horse battery\n")
    with stack.up():
        enrol("site-1", tmp_path / "without-site-2")
        enrol("site-2", tmp_path / "with-both")

        restore(tmp_path / "without-site-2", "earlier")
        wait_for(lambda: not status(stack, "site-2")["agent_in_session"], "site-2 is in no session", PROMPT_S)
        wait_for(lambda: online(stack) == ["site-1"], "site-1 follows", PROMPT_S)
        problem = "refused a publish on fedcg/1/shapes/devices/site-2/up/control: Not authorized"
        wait_for(lambda: problem in stack.tail("site-2"), "site-2 logs why", PROMPT_S)

        restore(tmp_path / "with-both", "later")
        wait_for(lambda: online(stack) == ["site-1", "site-2"], "both follow", PROMPT_S)
        for device in stack.devices:
            wait_for(lambda: status(stack, device)["agent_in_session"], f"{device} is in session", PROMPT_S)  # noqa: B023
            assert status(stack, device)["link_problem"] is None
        epochs = [event["epoch"] for event in stack.events("site-1") if event["event"] == "welcomed"]
        assert epochs == sorted(set(epochs)), "each restored coordinator has an epoch above the one before"
        assert stack.tail("site-2").count("refused a publish") == 1

        rotate(stack)
        for device in stack.devices:
            stack.wait_event(device, has_followed(1), f"{device} follows")
        newest = stack.home / "signing-1.key"
        stack.kill("broker")
        restore(tmp_path / "with-both", "before-the-rotation")
        stack.start_broker()  # devices have no session any more, and say what they remember
        wait_for(lambda: "older message key" in problems(stack), "the restored coordinator names its key")
        assert "devices are ahead" not in problems(stack)
        assert all(step in problems(stack)["older message key"] for step in ("signing-N.key", "rotate-key"))
        before = {device: welcomes(stack, device) for device in stack.devices}
        shutil.copy(newest, stack.home)
        rotate(stack)
        for device in stack.devices:
            wait_for(lambda: welcomes(stack, device) > before[device], f"{device} is back")  # noqa: B023
        wait_for(lambda: "older message key" not in problems(stack), "the problem is over")
