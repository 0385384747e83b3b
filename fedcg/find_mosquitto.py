"""Finds a Mosquitto binary on this machine: installed, or unpacked without root into its own folder."""

import os
import shutil
from pathlib import Path

from fedcg.values import Value

ENVIRONMENT_VARIABLE = "FEDCG_BROKER_DIR"
DEFAULT_FOLDER = ".broker"
NO_MOSQUITTO = "Mosquitto is not installed: run `make setup-broker`, or `apt-get install mosquitto` as root"


class Mosquitto(Value):
    """A Mosquitto binary that can be started.

    Attributes:
        binary: the executable.
        library_path: folder of the shared libraries that were unpacked with it; None for an installed one.
    """

    binary: Path
    library_path: Path | None = None

    def environment(self) -> dict[str, str]:
        """The environment to start it in: this process's, with the path of its libraries."""
        variables = dict(os.environ)
        if self.library_path is not None:
            parts = [str(self.library_path), variables.get("LD_LIBRARY_PATH", "")]
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in parts if part)
        return variables


def find_installed() -> Mosquitto | None:
    """A Mosquitto on PATH or in the system's folders."""
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/local/sbin:/usr/sbin:/sbin")
    return None if found is None else Mosquitto(Path(found))


def find_extracted(folder: Path | None = None) -> Mosquitto | None:
    """A Mosquitto that was unpacked from its package.

    Args:
        folder: its folder; default: FEDCG_BROKER_DIR, or `.broker` in the working directory.
    """
    root = folder or Path(os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_FOLDER)
    binary = (root / "usr" / "sbin" / "mosquitto").resolve()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        return None
    libraries = sorted(path.parent for path in (root / "usr" / "lib").glob("*/lib*.so*"))
    return Mosquitto(binary, libraries[0].resolve() if libraries else None)


def find_mosquitto() -> Mosquitto | None:
    """The installed Mosquitto, else the unpacked one, else None."""
    return find_installed() or find_extracted()
