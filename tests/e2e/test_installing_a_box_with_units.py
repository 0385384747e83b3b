"""`deploy/box/install.sh` without --root, on a machine of its own: a mount namespace, where stand-ins of systemctl, useradd and runuser record calls.

Nothing of this machine is written: /etc is a small copy there, /opt and /var/lib are folders of the test. Slow for the installations.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_client.cli.agent_commands import AGENT_UNIT, render_agent_unit
from edge_client.store.private_store import STORE_FORMAT
from tests.support.box_install import (
    AGENT_TOML,
    NEXT_FORMAT,
    SCRIPT,
    content,
    environment,
    fill_store,
    make_wheel,
    next_format,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
ENTER = """set -e
mount --bind "$MACHINE/etc" /etc
mount --bind "$MACHINE/opt" /opt
mount --bind "$MACHINE/var/lib" /var/lib
exec "$@"
"""
SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >>"$MACHINE/calls"
[ "$1" != list-units ] || cat "$MACHINE/units"
[ "$1" != start ] || echo trained >>/var/lib/fedcg/circles/events.jsonl
[ "$*" != "start fedcg-agent@shapes.service" ] || [ "$(readlink /opt/fedcg/venv)" != "$(cat "$MACHINE/broken")" ]
"""
RUNUSER = """#!/bin/sh
echo "as $2: $5 $7 $8 $9" >>"$MACHINE/calls"
shift 3
exec "$@"
"""
USERADD = """#!/bin/sh
echo "useradd $*" >>"$MACHINE/calls"
"""
RUNNING = """fedcg-agent@circles.service loaded active running FedCG Edge agent
fedcg-agent@shapes.service loaded active running FedCG Edge agent
fedcg-infer@shapes.service loaded activating auto-restart FedCG Edge predictions
"""
STOP = "systemctl stop fedcg-agent@circles.service fedcg-agent@shapes.service fedcg-infer@shapes.service"
NAMESPACE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


@dataclass(frozen=True)
class Machine:
    """A machine that the script takes for its own."""

    root: Path

    def start(self, action: str, wheel: Path) -> subprocess.Popen[str]:
        """The script, in a process group of its own."""
        words = (str(SCRIPT), action, "--source", str(wheel), "--python", sys.executable)
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            (*NAMESPACE, "bash", "-c", ENTER, "enter", *words),
            env=environment(MACHINE=str(self.root), PATH=path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def put(self, action: str, wheel: Path) -> tuple[int, str]:
        """Exit code and output of the script."""
        process = self.start(action, wheel)
        output, _ = process.communicate(timeout=280)
        return process.returncode, output

    def calls(self) -> list[str]:
        """What the stand-ins were called with since the last question."""
        found = (self.root / "calls").read_text().splitlines()
        (self.root / "calls").write_text("")
        return found

    def link(self) -> Path:
        """The folder of the version in use."""
        return (self.root / "opt" / "fedcg" / "venv").readlink()

    def store(self, name: str) -> Path:
        """The private store of a federation."""
        return self.root / "var" / "lib" / "fedcg" / name


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions; private stores of the second have another format."""
    folder = tmp_path_factory.mktemp("wheels")
    return make_wheel(folder, "1.0"), make_wheel(folder, "1.1", next_format())


@pytest.fixture
def machine(tmp_path: Path, wheels: tuple[Path, Path]) -> Machine:
    """A machine with 1.0, and running agents of two federations: `circles` has a store of the format of 1.1, `shapes` one of that of 1.0."""
    probe = subprocess.run((*NAMESPACE, "mount", "--bind", "/tmp", "/opt"), capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace can be made: {probe.stderr.decode()}")
    made = Machine(tmp_path)
    for name in ("opt", "var/lib", "bin", "etc/systemd"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("passwd", "group", "nsswitch.conf", "ssl", "localtime"):
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, tmp_path / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, tmp_path / "etc" / name)
    for name, text in (("systemctl", SYSTEMCTL), ("runuser", RUNUSER), ("useradd", USERADD)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("calls", "units", "broken"):
        (tmp_path / name).touch()
    code, output = made.put("install", wheels[0])
    assert code == 0, output
    for name, version in (("circles", NEXT_FORMAT), ("shapes", STORE_FORMAT)):
        fill_store(made.store(name), version)
        (tmp_path / "etc" / "fedcg" / name).mkdir()
        (tmp_path / "etc" / "fedcg" / name / "agent.toml").write_text(AGENT_TOML)
    return made


def test_units_rest_while_stores_change_those_that_ran_start_again_and_all_are_stopped_before_a_removal(
    machine: Machine, wheels: tuple[Path, Path]
) -> None:
    installing = machine.calls()
    assert any(call.startswith("useradd --system") and call.endswith(" fedcg") for call in installing)
    assert (machine.root / "etc" / "systemd" / "system" / AGENT_UNIT).read_text() == render_agent_unit()
    (machine.root / "units").write_text(RUNNING)
    code, output = machine.put("upgrade", wheels[1])
    assert code == 0, output
    assert json.loads((machine.store("shapes") / "format.json").read_text())["format"] == NEXT_FORMAT
    assert [call for call in machine.calls() if not call.startswith("useradd")] == [
        "systemctl list-units --plain --no-legend --state=active,activating fedcg-agent@* fedcg-infer@*",
        STOP,
        "as fedcg: FEDCG_AGENT_STORE=/var/lib/fedcg/circles agent store migrate",
        "as fedcg: FEDCG_AGENT_STORE=/var/lib/fedcg/shapes agent store migrate",
        "systemctl daemon-reload",
        "systemctl start fedcg-agent@circles.service",
        "systemctl start fedcg-agent@shapes.service",
        "systemctl start --no-block fedcg-infer@shapes.service",
    ]
    kept = content(machine.store("shapes"))
    code, output = machine.put("uninstall", wheels[1])
    assert code == 0, output
    assert machine.calls()[1:] == [STOP, "systemctl daemon-reload"]
    assert not (machine.root / "opt" / "fedcg").exists()
    assert not list((machine.root / "etc" / "systemd" / "system").glob("fedcg-*"))
    assert content(machine.store("shapes")) == kept


def test_an_agent_that_does_not_start_brings_back_the_old_version_and_only_the_store_that_it_could_not_read(
    machine: Machine, wheels: tuple[Path, Path]
) -> None:
    machine.calls()
    before = {name: content(machine.store(name)) for name in ("circles", "shapes")}
    (machine.root / "units").write_text(RUNNING)
    (machine.root / "broken").write_text("venv-b")
    code, output = machine.put("upgrade", wheels[1])
    assert code == 1, output
    assert machine.link() == Path("venv-a")
    assert content(machine.store("shapes")) == before["shapes"]
    circles = content(machine.store("circles"))
    assert circles.pop("events.jsonl").decode().split(), "what an agent of the new version did is lost"
    assert circles == before["circles"]
    assert machine.calls()[-4:] == [
        "systemctl daemon-reload",
        "systemctl start fedcg-agent@circles.service",
        "systemctl start fedcg-agent@shapes.service",
        "systemctl start --no-block fedcg-infer@shapes.service",
    ]


def test_an_upgrade_that_is_killed_between_copy_and_migration_is_repeated_and_done(
    machine: Machine, wheels: tuple[Path, Path]
) -> None:
    (machine.root / "units").write_text(RUNNING)
    hung = machine.root / "bin" / "runuser"
    hung.write_text('#!/bin/sh\ntouch "$MACHINE/hangs"\nexec sleep 600\n')
    process = machine.start("upgrade", wheels[1])
    wait_until((machine.root / "hangs").exists, "the new version opens a store", 200)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert machine.store(".shapes.before-upgrade").exists()
    hung.write_text(RUNUSER)
    (machine.root / "calls").write_text("")
    code, output = machine.put("upgrade", wheels[1])
    assert code == 0, output
    assert "interrupted" in output
    assert "systemctl start fedcg-agent@shapes.service" in machine.calls()[:4], "agents that were stopped start first"
    assert sorted(path.name for path in machine.store("shapes").parent.iterdir()) == ["circles", "shapes"]
    assert json.loads((machine.store("shapes") / "format.json").read_text())["format"] == NEXT_FORMAT
