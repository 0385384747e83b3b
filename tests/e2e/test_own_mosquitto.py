"""The README's table "A real deployment" with a Mosquitto of the operator's own: its commands, as printed, one after the other."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.broker.deployed_mosquitto import ACCOUNT
from fedcg.find_mosquitto import find_mosquitto
from tests.support.broker.broker_plant import end, listens
from tests.support.stack import CLASSES, wait_for, write_images
from tests.support.waiting import free_port

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
README = Path(__file__).parents[2] / "README.md"
DEVICE = "site-1"
IS_ROOT = os.geteuid() == 0
PLAN = (
    f'federation = "shapes"\nclasses = {json.dumps(CLASSES)}\nmethod = "fedcg"\nrounds = 1\nmin_clients = 3\n'
    '[image]\nmode = "L"\nheight = 32\nwidth = 32\nmean = [0.5]\nstd = [0.5]\n[network]\nsplit = "lenet5_relu"\n'
)


def printed_commands() -> list[str]:
    """What stands between back-ticks in the table, from top to bottom."""
    section = README.read_text().split("## A real deployment")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`((?:fedcg|mosquitto) [^`]+)`", row)]


@dataclass
class Operator:
    """Somebody at a shell who types what is printed, with the names filled in and with ports that are free."""

    folder: Path
    mosquitto: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(3)])

    def line(self, command: str) -> list[str]:
        filled = {
            "HOME": self.folder / "home",
            "CONFIG": self.folder / "config",
            "NAME": "localhost",
            "plan.toml": self.folder / "plan.toml",
            "DIR": self.folder / "box",
            "IMAGES": self.folder / "images",
            "8444": self.ports[0],
        }
        text = re.sub("|".join(map(re.escape, filled)), lambda word: str(filled[word.group()]), command)
        if text.startswith("fedcg coordinator init"):
            text += f" --broker-port {self.ports[1]} --api-port {self.ports[2]}"
        return shlex.split(text)

    def run(self, command: str, typed: str = "") -> str:
        done = subprocess.run(
            self.line(command),
            input=typed,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=self._environment(),
            cwd=self.folder,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                self.line(command), stdout=log, stderr=log, env=self._environment(), cwd=self.folder
            )

    def has_event(self, log: Path, text: str) -> bool:
        for name, process in self.running.items():
            assert process.poll() is None, f"{name} ended: {(self.folder / f'{name}.log').read_text()}"
        return log.exists() and text in log.read_text()

    def listens(self) -> bool:
        assert self.running["mosquitto"].poll() is None, (self.folder / "mosquitto.log").read_text()
        return listens(self.ports[1])

    def _environment(self) -> dict[str, str]:
        here = [str(Path(sys.executable).parent), str(self.mosquitto.parent), os.environ["PATH"]]
        return {**os.environ, "PATH": os.pathsep.join(here), "HOME": str(self.folder), "TMPDIR": str(self.folder)}


@pytest.fixture
def operator() -> Iterator[Operator]:
    """Root, whose Mosquitto runs under its own account, or an ordinary user: whoever runs the tests."""
    found = find_mosquitto()
    if found is None or found.library_path is not None:
        pytest.skip("no installed Mosquitto; `make setup-broker` as root installs it")
    if IS_ROOT and ACCOUNT not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip(f"root can start Mosquitto only where there is a user {ACCOUNT}")
    folder = Path(tempfile.mkdtemp(prefix="fedcg-"))  # pytest's own folders are closed to the user mosquitto
    folder.chmod(0o755)
    (folder / "plan.toml").write_text(PLAN)
    write_images(folder / "images", per_class=4, seed=1)
    made = Operator(folder, found.binary)
    yield made
    for name in reversed(list(made.running)):
        end(made.running[name])
    shutil.rmtree(folder)


def test_the_printed_commands_lead_to_a_box_that_is_welcome(operator: Operator) -> None:
    init, create, deploy, start, _or_ours, run, token, enrol, doctor, agent = printed_commands()
    folder = operator.folder
    operator.run(init)
    operator.run(create)
    output = operator.run(deploy)
    assert f"{start.split()[0]} -c {folder / 'config' / 'mosquitto.conf'}" in output
    operator.start("mosquitto", start)
    wait_for(operator.listens, "Mosquitto listens", 30)
    if IS_ROOT:
        assert owner(operator.running["mosquitto"].pid) == ACCOUNT
    operator.start("coordinator", run)
    log = folder / "home" / "events.jsonl"
    wait_for(lambda: operator.has_event(log, '"event": "link", "up": true'), "the coordinator has its link")
    word = operator.run(token).split()[0]
    operator.run(enrol, typed=f"{word}\n")  # the device is new to the broker, which runs: its access list must change
    assert f"user {DEVICE}" in (folder / "config" / "acl").read_text()
    operator.run(doctor)
    operator.start("agent", agent)
    box = folder / "box" / "store" / "events.jsonl"
    wait_for(lambda: operator.has_event(box, '"event": "welcomed"'), "the coordinator has answered the box")
    for name in ("agent", "coordinator", "mosquitto"):
        end(operator.running[name])
    assert (folder / "config" / "data" / "mosquitto.db").stat().st_size > 0  # sessions outlive a restart


def owner(pid: int) -> str:
    """The user that a process runs under now."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))
    return pwd.getpwuid(int(line.split()[2])).pw_name
