"""Devices and the keys of their coordinator, with a real broker and agents as processes.

Boxes are replaced, revoked and leave; the message key is rotated; a coordinator goes back to a backup.
"""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.errors import ALREADY_RUNNING
from fedcg.wire.messages.enrolment_messages import load_certificate
from fedcg.wire.messages.envelopes import VerifyKey
from tests.support.broker.broker_plant import end
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.toml_edit import set_values
from tests.support.stack import CLASSES, Stack, wait_for, write_images
from tests.support.waiting import free_port

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


PAGE = Path(__file__).parents[2] / "docs/how-to/deploy.md"
DEVICE = "site-1"
PLAN = (
    f'federation = "shapes"\nclasses = {json.dumps(CLASSES)}\nmethod = "fedsplit"\nrounds = 200\nmin_clients = 1\nmin_cohort = 1\n'
    '[input]\nmode = "L"\nheight = 32\nwidth = 32\nmean = [0.5]\nstd = [0.5]\n[network]\nsplit = "lenet5_relu"\n'
    "[params]\nepochs = 1\n"
)


def printed_commands() -> list[str]:
    """The commands between back-ticks in the table, from top to bottom."""
    section = PAGE.read_text().split("## Set up")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`(fedcg [^`]+)`", row)]


@dataclass
class Operator:
    """A person at the shells of three machines who types the printed commands, with the names filled in and with free ports."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(3)])

    @property
    def home(self) -> Path:
        return self.folder / "coordinator-machine" / "home"

    def line(self, command: str) -> list[str]:
        filled = {
            "HOME": self.home,
            "CONFIG": self.folder / "broker-machine" / "config",
            "OUT": self.folder / "coordinator-machine" / "written",
            "NAME": "localhost",
            "plan.toml": self.folder / "plan.toml",
            "DIR": self.folder / "box",
            "IMAGES": self.folder / "images",
            "8444": self.ports[0],
        }
        text = re.sub("|".join(map(re.escape, filled)), lambda word: str(filled[word.group()]), command)
        if text.startswith("fedcg coordinator init"):
            text += f" --broker-port {self.ports[1]} --api-port {self.ports[2]}"
        return [sys.executable, "-m", *shlex.split(text)]

    def run(self, command: str, typed: str = "") -> str:
        done = subprocess.run(
            self.line(command), input=typed, capture_output=True, text=True, timeout=120, check=False, cwd=self.folder
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(self.line(command), stdout=log, stderr=log, cwd=self.folder)

    def has_event(self, log: Path, text: str) -> bool:
        for name, process in self.running.items():
            assert process.poll() is None, f"{name} ended: {(self.folder / f'{name}.log').read_text()}"
        return log.exists() and text in log.read_text()

    def listens(self) -> bool:
        assert self.running["broker"].poll() is None, (self.folder / "broker.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.ports[1])) == 0

    def end(self, name: str) -> None:
        end(self.running.pop(name))


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    for machine in ("coordinator-machine", "broker-machine"):
        (tmp_path / machine).mkdir()
    (tmp_path / "plan.toml").write_text(PLAN)
    write_images(tmp_path / "images", per_class=8, seed=1)
    made = Operator(tmp_path)
    yield made
    for name in reversed(list(made.running)):
        made.end(name)


def test_printed_commands_lead_to_rounds_over_a_broker_elsewhere_and_a_revoked_box_is_out(operator: Operator) -> None:
    init, create, deploy, start, run, token, enrol, doctor, agent, revoke = printed_commands()
    folder, config = operator.folder, operator.folder / "broker-machine" / "config"
    operator.run(init)
    operator.run(create)
    operator.run(deploy)
    shutil.copytree(folder / "coordinator-machine" / "written", config)
    away = operator.home.parent.rename(folder / "away")  # the broker starts on a machine without it
    operator.start("broker", start)
    wait_for(operator.listens, "Mosquitto listens", 30)
    away.rename(operator.home.parent)
    operator.start("coordinator", run)
    log = operator.home / "events.jsonl"
    wait_for(lambda: operator.has_event(log, '"up": true'), "the coordinator has its link")
    word = operator.run(token).split()[0]
    operator.run(enrol, typed=f"{word}\n")  # the device is new to the broker, which runs: its lists must change
    assert f"user {DEVICE}" in (config / "acl").read_text()
    operator.run(doctor)
    operator.start("agent", agent)
    wait_for(lambda: operator.has_event(log, '"event": "distilling"'), "a round is merged")

    assert f"{DEVICE} is revoked" in (told := operator.run(revoke))
    assert "has not applied the new lists" not in told
    writes = [line for line in (config / "acl").read_text().splitlines() if line.startswith("topic write")]
    assert not any(f"/devices/{DEVICE}/" in line for line in writes)  # it may read that it is revoked
    operator.end("broker")
    operator.start("broker", start)
    box = folder / "box" / "store" / "events.jsonl"
    wait_for(lambda: operator.has_event(box, '"event": "link_problem"'), "the box is refused by the broker's new start")
    wait_for(lambda: (config / "data" / "mosquitto.db").exists(), "sessions are kept on the broker's machine")
    assert not list((operator.home / "broker").glob("acl"))  # nothing runs from the coordinator's directory
