"""The README's table "A real deployment": its commands, as printed, with a Mosquitto on a machine without the coordinator's directory."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.stack import CLASSES, wait_for, write_images
from tests.support.waiting import free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
README = Path(__file__).parents[2] / "README.md"
DEVICE = "site-1"
PLAN = (
    f'federation = "shapes"\nclasses = {json.dumps(CLASSES)}\nmethod = "fedsplit"\nrounds = 200\nmin_clients = 1\nmin_cohort = 1\n'
    '[image]\nmode = "L"\nheight = 32\nwidth = 32\nmean = [0.5]\nstd = [0.5]\n[network]\nsplit = "lenet5_relu"\n'
    "[params]\nepochs = 1\n"
)


def printed_commands() -> list[str]:
    """The commands between back-ticks in the table, from top to bottom."""
    section = README.read_text().split("## A real deployment")[1].split("\n## ")[0]
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
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


def test_the_printed_commands_lead_to_rounds_over_a_broker_elsewhere_and_a_revoked_box_is_out(
    operator: Operator,
) -> None:
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
    assert "No broker has applied" not in told
    writes = [line for line in (config / "acl").read_text().splitlines() if line.startswith("topic write")]
    assert not any(f"/devices/{DEVICE}/" in line for line in writes)  # it may read that it is revoked
    operator.end("broker")
    operator.start("broker", start)
    box = folder / "box" / "store" / "events.jsonl"
    wait_for(lambda: operator.has_event(box, '"event": "link_problem"'), "the box is refused by the broker's new start")
    wait_for(lambda: (config / "data" / "mosquitto.db").exists(), "sessions are kept on the broker's machine")
    assert not list((operator.home / "broker").glob("acl"))  # nothing runs from the coordinator's directory
