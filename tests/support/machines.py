"""A second machine that can vanish: a network namespace, whose link to this one is cut without notice to either side."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

ADDRESS, OTHER = "10.213.77.1", "10.213.77.2"  # of both machines, on the link between them

needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="makes a network namespace: needs root and `ip` of iproute2"
)


@dataclass(frozen=True)
class Machine:
    """The other machine; programs with the prefix `enter` run there."""

    name: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def vanish(self) -> None:
        """Cut its link: no data arrives on either side, and no connection is closed."""
        _ip("-n", self.name, "link", "set", self.name, "down")


@contextmanager
def second_machine() -> Iterator[Machine]:
    machine = Machine(f"fedcg{secrets.token_hex(4)}")
    here = f"{machine.name}h"
    _ip("netns", "add", machine.name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", machine.name, "netns", machine.name)
        _ip("address", "add", f"{ADDRESS}/24", "dev", here)
        _ip("-n", machine.name, "address", "add", f"{OTHER}/24", "dev", machine.name)
        _ip("link", "set", here, "up")
        _ip("-n", machine.name, "link", "set", machine.name, "up")
        yield machine
    finally:
        _ip("netns", "delete", machine.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)
