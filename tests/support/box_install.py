"""Shared by tests of `deploy/box/install.sh`: wheels of this checkout with any version, devices with private stores, runs of the script."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

from edge_client.store.checked_files import read_json, write_json
from edge_client.store.private_store import STORE_FORMAT
from fedcg.files import SECRET_BYTES, checked_secret
from tests.support.edge.filled_store import files_of

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "deploy" / "box" / "install.sh"
GOLDEN_STORE = REPOSITORY / "tests" / "golden" / "stores" / f"format-{STORE_FORMAT}"
NEXT_FORMAT = STORE_FORMAT + 1
"""The store format of a fictitious version, which migrates stores of the present format."""
AGENT_TOML = """federation = "shapes"
device = "site-1"
[broker]
host = "127.0.0.1"
insecure = true
[data]
root = "images"
"""


def make_wheel(folder: Path, version: str, replaced: Mapping[str, str] | None = None) -> Path:
    """Build the checkout as a wheel of that version, with some files replaced and dependencies from the test's environment.

    A .pth file in the wheel adds that environment's folder after the installation's own, so pip downloads nothing.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    facts, packages = project["project"], project["tool"]["setuptools"]["packages"]["find"]["include"]
    groups = {"console_scripts": facts["scripts"], **facts["entry-points"]}
    lines = [
        line for group, found in groups.items() for line in (f"[{group}]", *(f"{a} = {b}" for a, b in found.items()))
    ]
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in facts["optional-dependencies"])
    info, wheel = f"fedcg_edge-{version}.dist-info", folder / f"fedcg_edge-{version}-py3-none-any.whl"
    content = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: fedcg-edge\nVersion: {version}\n{extras}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(lines) + "\n",
        "borrowed.pth": sysconfig.get_path("purelib") + "\n",
        **(replaced or {}),
    }
    files = [path for name in packages for path in (REPOSITORY / name.rstrip("*")).rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in files:
            name = str(path.relative_to(REPOSITORY))
            if "__pycache__" not in path.parts and name not in content:
                archive.write(path, name)
        for name, text in content.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    return wheel


def environment(**more: str) -> dict[str, str]:
    """This process's environment without its import path; pip installs the wheel alone."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**clean, "PIP_NO_DEPS": "1", "PIP_NO_COMPILE": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


def next_format() -> dict[str, str]:
    """Return the files that differ in the version with `NEXT_FORMAT`."""
    name = "edge_client/store/private_store.py"
    text = (REPOSITORY / name).read_text()
    for old, new in (
        (f"STORE_FORMAT = {STORE_FORMAT}\n", f"STORE_FORMAT = {NEXT_FORMAT}\n"),
        ('found.get("format") != STORE_FORMAT', f'found.get("format") not in ({STORE_FORMAT}, STORE_FORMAT)'),
        (
            "        if opened := self.open_to_others():",
            (
                "        path = self.root / FORMAT_FILE\n"
                '        write_json(path, {**read_json(path), "format": STORE_FORMAT})\n'
                "        if opened := self.open_to_others():"
            ),
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {name: text}


@dataclass(frozen=True)
class Box:
    """A scratch root for the script's installations."""

    root: Path

    @property
    def prefix(self) -> Path:
        """The folder of the program."""
        return self.root / "opt" / "fedcg"

    @property
    def stores(self) -> Path:
        """The folder of private stores."""
        return self.root / "var" / "lib" / "fedcg"

    def run(
        self, *words: str | Path, script: Path = SCRIPT, depends: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script with these arguments, this root and extra environment, without a terminal; with `depends` pip installs dependencies."""
        env = environment(**more)
        if depends:
            del env["PIP_NO_DEPS"]
        command = [str(script), *map(str, words), "--root", str(self.root)]
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=600
        )

    def put(self, action: str, wheel: Path) -> subprocess.CompletedProcess[str]:
        """Install or upgrade to a wheel with this Python."""
        return self.run(action, "--source", wheel, "--python", sys.executable)

    def version(self) -> str:
        """Return the version that the installed program prints."""
        command = [str(self.prefix / "venv" / "bin" / "fedcg"), "--version"]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout.split()[-1]

    def add_store(self, name: str, version: int) -> None:
        """Make a device of the federation `name` with a private store of any format."""
        fill_store(self.stores / name, version)
        config = self.root / "etc" / "fedcg" / name
        config.mkdir(parents=True)
        (config / "agent.toml").write_text(AGENT_TOML)

    def units(self) -> dict[str, str]:
        """Return installed units by name."""
        return {path.name: path.read_text() for path in (self.root / "etc" / "systemd" / "system").glob("*.service")}


def fill_store(place: Path, version: int) -> None:
    """Copy the golden private store with any format number, readable by its owner only, and with a checked secret."""
    shutil.copytree(GOLDEN_STORE, place)
    write_json(place / "format.json", {**read_json(place / "format.json"), "format": version})
    (place / "secrets" / "device.key").write_bytes(checked_secret(b"d" * SECRET_BYTES))
    for path in (place, *place.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, except locks, by path."""
    return {name: data for name, data in files_of(folder).items() if not name.endswith("lock")}
