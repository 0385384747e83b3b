"""`deploy/box/install.sh`, run for real: below a scratch root, and without --root on a machine of its own with stand-ins of systemctl, useradd and runuser.

That machine is a mount namespace, so nothing of this one is written: /etc is a small copy there, /opt and /var/lib are folders of the test.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tomllib

from edge_client.store.private_store import STORE_FORMAT
from edge_client.store.sum_gate import SumGate
from tests.support.box_install import (
    AGENT_TOML,
    NEXT_FORMAT,
    REPOSITORY,
    SCRIPT,
    Box,
    content,
    environment,
    fill_store,
    make_wheel,
    next_format,
)
from tests.support.waiting import wait_until

AGENT_UNIT, INFER_UNIT = "fedcg-agent@.service", "fedcg-infer@.service"
UNITS = REPOSITORY / "deploy" / "systemd"


@dataclass(frozen=True)
class After:
    """A box after one run of the script."""

    done: subprocess.CompletedProcess[str]
    version: str
    stores: dict[str, bytes]
    units: dict[str, str]
    prefix: frozenset[str]


def after(box: Box, done: subprocess.CompletedProcess[str]) -> After:
    return After(
        done, box.version(), content(box.stores), box.units(), frozenset(path.name for path in box.prefix.iterdir())
    )


def store_before(folder: Path) -> dict[str, bytes]:
    """What the store of the federation `shapes` held before an upgrade."""
    fill_store(folder / "before" / "shapes", STORE_FORMAT)
    return content(folder / "before")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Box]:
    """A folder for wheels, and a box."""
    return tmp_path_factory.mktemp("wheels"), Box(tmp_path_factory.mktemp("box"))


@pytest.fixture(scope="module")
def life(place: tuple[Path, Box]) -> dict[str, After]:
    """One box from its installation on; each entry is the state after a step."""
    wheels, box = place
    make_wheel(wheels, "1.0")
    found = {"installed": after(box, box.put("install", wheels))}  # of the folder, without an index
    box.add_store("shapes", STORE_FORMAT)
    found["upgraded"] = after(box, box.put("upgrade", make_wheel(wheels, "1.1", next_format())))
    return found


@pytest.fixture(scope="module")
def refusals(place: tuple[Path, Box], life: dict[str, After]) -> dict[str, After]:
    """The same box after releases that it can't have."""
    wheels, box = place
    shutil.rmtree(box.stores / "shapes")
    fill_store(box.stores / "shapes", STORE_FORMAT)
    box.add_store("zebra", 99)
    found = {"store too new": after(box, box.put("upgrade", make_wheel(wheels, "1.2", next_format())))}
    broken = {"edge_client/cli/store_commands.py": "raise ImportError('half a release')\n"}
    return {**life, **found, "broken release": after(box, box.put("upgrade", make_wheel(wheels, "1.3", broken)))}


@pytest.mark.slow
def test_the_installed_program_is_the_wheels_and_its_units_are_in_place(life: dict[str, After]) -> None:
    installed = life["installed"]
    assert installed.done.returncode == 0, installed.done.stderr
    assert installed.version == "1.0"
    assert installed.prefix == {"venv", "venv-a", ".lock"}
    assert installed.units == {
        AGENT_UNIT: (UNITS / AGENT_UNIT).read_text(),
        INFER_UNIT: (UNITS / INFER_UNIT).read_text(),
    }
    assert "creates no user, stops and starts no unit" in installed.done.stdout


@pytest.mark.slow
def test_an_upgrade_changes_the_version_and_the_stores_format_and_keeps_every_other_byte(
    life: dict[str, After], tmp_path: Path
) -> None:
    upgraded, before = life["upgraded"], store_before(tmp_path)
    assert upgraded.done.returncode == 0, upgraded.done.stderr
    assert upgraded.version == "1.1"
    assert upgraded.prefix == {"venv", "venv-b", ".lock"}, "no copy of private data and no earlier version is left"
    stores = dict(upgraded.stores)
    assert json.loads(stores.pop("shapes/format.json"))["format"] == NEXT_FORMAT
    assert json.loads(before.pop("shapes/format.json"))["format"] == STORE_FORMAT
    assert stores == before
    assert f"has format {NEXT_FORMAT}, trained up to round 2" in upgraded.done.stdout


@pytest.mark.slow
def test_an_onnxruntime_that_is_there_is_kept_and_else_the_one_for_the_cpu_is_asked_for(
    place: tuple[Path, Box], life: dict[str, After], tmp_path: Path
) -> None:
    assert (place[1].prefix / "venv" / "fedcg.extras").read_text() == "edge,infer\n"
    assert "use --extra edge,infer-gpu" in life["installed"].done.stdout
    jetson, package = Box(tmp_path / "jetson"), tmp_path / "system" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    words = ("--source", place[0] / "fedcg_edge-1.0-py3-none-any.whl", "--python", sys.executable)
    done = jetson.run("install", *words, PYTHONPATH=str(package.parent))
    assert done.returncode == 0, done.stderr
    assert (jetson.prefix / "venv" / "fedcg.extras").read_text() == "edge\n"
    assert "infer-gpu" not in done.stdout


@pytest.mark.slow
def test_a_store_that_the_new_version_cannot_read_keeps_the_old_version_and_every_store_as_it_was(
    refusals: dict[str, After], tmp_path: Path
) -> None:
    refused = refusals["store too new"]
    assert refused.done.returncode == 1
    assert f"has store format 99; this program only reads format {NEXT_FORMAT}" in " ".join(refused.done.stderr.split())
    assert "version 1.1, units and private stores are unchanged" in refused.done.stderr
    assert f"has format {NEXT_FORMAT}" in refused.done.stdout, "the other store was migrated before, and must come back"
    assert (refused.version, refused.prefix) == ("1.1", refusals["upgraded"].prefix)
    assert {name: data for name, data in refused.stores.items() if name.startswith("shapes/")} == store_before(tmp_path)
    assert json.loads(refused.stores["zebra/format.json"])["format"] == 99


@pytest.mark.slow
def test_a_release_that_does_not_run_changes_nothing(refusals: dict[str, After]) -> None:
    refused, before = refusals["broken release"], refusals["store too new"]
    assert refused.done.returncode == 1
    assert "half a release" in refused.done.stderr
    assert replace(refused, done=before.done) == before


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A box with a private store, and in place of a program the folders of one."""
    made = Box(tmp_path / "root")
    made.add_store("shapes", STORE_FORMAT)
    units = made.root / "etc" / "systemd" / "system"
    (units / "multi-user.target.wants").mkdir(parents=True)
    (units / AGENT_UNIT).write_text("agent")
    (units / "multi-user.target.wants" / "fedcg-agent@shapes.service").symlink_to(units / AGENT_UNIT)
    (units / "other.service").write_text("other")
    (made.prefix / "venv-a").mkdir(parents=True)
    (made.prefix / "venv").symlink_to("venv-a")
    return made


def test_uninstall_removes_program_and_units_and_keeps_stores_configurations_and_other_units(box: Box) -> None:
    before = content(box.stores)
    done = box.run("uninstall")
    assert done.returncode == 0, done.stderr
    assert not box.prefix.exists()
    assert set(box.units()) == {"other.service"}
    assert not any((box.root / "etc" / "systemd" / "system" / "multi-user.target.wants").iterdir())
    assert content(box.stores) == before
    assert (box.root / "etc" / "fedcg" / "shapes" / "agent.toml").exists()
    assert box.run("uninstall").returncode == 0, "it can be repeated"


def test_purge_names_what_it_removes_and_without_a_terminal_needs_yes(box: Box) -> None:
    before, configs = content(box.stores), box.root / "etc" / "fedcg"
    asked = box.run("uninstall", "--purge")
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    assert {str(box.stores / "shapes"), str(configs / "shapes")} <= set(asked.stdout.split())
    assert content(box.stores) == before
    assert (box.prefix / "venv-a").exists()
    done = box.run("uninstall", "--purge", "--yes")
    assert done.returncode == 0, done.stderr
    assert not box.stores.exists()
    assert not configs.exists()


def interrupt(box: Box, *, switched: bool) -> dict[str, bytes]:
    """The traces of an upgrade that was cut while it took its changes back, or with a version in place; the store is not its copy."""
    shutil.copytree(box.stores / "shapes", box.stores / ".shapes.before-upgrade")
    (box.prefix / "undo").mkdir()
    (box.prefix / "undo" / AGENT_UNIT).write_text("agent of the old version")
    (box.prefix / "undo" / "running").touch()
    (box.prefix / "undo" / "venv").symlink_to("venv-a")
    if not switched:
        (box.prefix / "venv").unlink()
    copied = content(box.stores / ".shapes.before-upgrade")
    (box.stores / "shapes" / "CURRENT").write_text("3\n")
    return copied


def test_an_upgrade_that_was_cut_while_it_took_its_changes_back_is_taken_back_to_the_end(box: Box) -> None:
    copied = interrupt(box, switched=False)
    assert box.put("upgrade", box.root / "no.whl").returncode == 2
    assert content(box.stores) == {f"shapes/{name}": data for name, data in copied.items()}
    assert (box.prefix / "venv").readlink() == Path("venv-a")
    assert box.units()[AGENT_UNIT] == "agent of the old version"


def test_a_store_that_was_used_since_an_upgrade_was_cut_is_not_replaced_by_its_copy(box: Box) -> None:
    interrupt(box, switched=True)
    assert box.put("upgrade", box.root / "no.whl").returncode == 2
    assert content(box.stores)["shapes/CURRENT"] == b"3\n"
    assert [path.name for path in box.stores.iterdir()] == ["shapes"]
    assert not (box.prefix / "undo").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("instal",), "Usage"),
        (("upgrade", "--sorce", "x"), "unknown option --sorce"),
        (("upgrade", "--source", ""), "needs a value"),
        (("upgrade", "--source", "torch==2"), "or a requirement such as fedcg-edge"),
        (("upgrade", "--extra", "edge;x"), "names with commas"),
        (("upgrade", "--python", "/bin/false"), "is not Python 3.10 or newer"),
        (("install", "--extra", "serve,nix"), "--extra nix: unknown extra; choose from audit coordinator "),
        (("upgrade",), "install first"),
    ],
)
def test_bad_options_are_refused_with_advice_and_change_nothing(box: Box, words: tuple[str, ...], said: str) -> None:
    before, empty = content(box.root), Box(box.root.with_name("empty"))
    place = empty if said == "install first" or "install" in words else box
    refused = place.run(*words)
    assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    assert content(box.root) == before
    assert not empty.root.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # installs packages, twice
def test_the_sources_install_with_what_they_depend_on_and_once_more_in_place_of_themselves(tmp_path: Path) -> None:
    sources, box = tmp_path / "sources", Box(tmp_path / "root")
    for name in ("fedcg", "edge_client", "coordinator", "export", "devices", "audit", "experiments", "deploy"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources / name)
    for folder, told in (("venv-a", "fedcg-infer@NAME"), ("venv-b", "is installed, before it was")):
        done = box.run("install", "--extra", "serve", script=sources / "deploy" / "box" / "install.sh", depends=True)
        if any(word in done.stdout + done.stderr for word in ("NewConnectionError", "Max retries")):
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stderr
        assert (box.prefix / "venv").readlink() == Path(folder)
        assert not list(box.prefix.glob("*/wheel"))
        assert told in done.stdout.splitlines()[-1]
        assert "enrol" not in done.stdout.splitlines()[-1]
        made = [path.name for path in sources.iterdir() if path.name == "build" or path.suffix == ".egg-info"]
        assert made == [], "the sources stay as they were"
    assert box.version() == tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert set(box.units()) == {INFER_UNIT}
    fedcg = box.prefix / "venv" / "bin" / "fedcg"
    served = subprocess.run(
        [fedcg, "infer", "serve", "--help"], env=environment(), capture_output=True, text=True, check=False
    )
    assert served.returncode == 0, served.stderr
    assert "--port" in served.stdout


def test_a_machine_with_a_coordinator_is_refused(box: Box) -> None:
    (box.root / "etc" / "systemd" / "system" / "fedcg-coordinator.service").touch()
    refused = box.run("install")
    assert (refused.returncode, "a coordinator is installed here" in refused.stderr) == (2, True)


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
        return subprocess.Popen(
            (*NAMESPACE, "bash", "-c", ENTER, "enter", *words),
            env=environment(MACHINE=str(self.root), PATH=f"{self.root / 'bin'}:{os.environ['PATH']}"),
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


@pytest.mark.slow
def test_units_rest_while_stores_change_those_that_ran_start_again_and_all_are_stopped_before_a_removal(
    machine: Machine, wheels: tuple[Path, Path]
) -> None:
    assert any(call.startswith("useradd --system") and call.endswith(" fedcg") for call in machine.calls())
    assert (machine.root / "etc" / "systemd" / "system" / AGENT_UNIT).read_text() == (UNITS / AGENT_UNIT).read_text()
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


@pytest.mark.slow
def test_an_agent_that_does_not_start_brings_back_the_old_version_and_only_the_store_that_it_could_not_read(
    machine: Machine, wheels: tuple[Path, Path]
) -> None:
    machine.calls()
    for name in ("circles", "shapes"):
        SumGate(machine.store(name)).make()
    before = {name: content(machine.store(name)) for name in ("circles", "shapes")}
    del before["shapes"][
        "sum_gate.json"
    ]  # the agent of the new version may have been in sums that the copy does not know
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


@pytest.mark.slow
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
