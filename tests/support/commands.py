"""Runs the command `fedcg` in a test's process or in a separate one, and lists all commands."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from typer.testing import CliRunner, Result

from fedcg.cli import fedcg


def run_fedcg(*words: object, typed: str | None = None, environment: Mapping[str, str] | None = None) -> Result:
    """Run `fedcg` with these arguments; return exit code, stdout and stderr. Log handlers that it installs are removed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return CliRunner().invoke(fedcg, [str(word) for word in words], input=typed, env=environment)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def succeeds(*words: object, typed: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Return the stdout of a command that ends with exit code 0."""
    ended = run_fedcg(*words, typed=typed, environment=environment)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def fails(code: int, *words: object, typed: str | None = None) -> str:
    """Return the stderr of a command that ends with this exit code, on one line."""
    ended = run_fedcg(*words, typed=typed)
    assert ended.exit_code == code, ended.output
    return " ".join(ended.stderr.split())


def start_fedcg(*words: object) -> subprocess.Popen[str]:
    """Start a `fedcg` command on one thread, in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedcg", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Return the stderr of a command until its successful end."""
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return errors


def data_of(output: str | bytes) -> Any:
    """Return the data in the single envelope that a command printed with `--json`; a failed command fails the test."""
    envelope = json.loads(output.splitlines()[0])
    assert envelope["ok"] is True, envelope
    return envelope["data"]


def commands_of(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command below a command line or one of its groups, with its words."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    for inner in command.list_commands(None):
        yield from commands_of(command.get_command(None, inner), (*name, inner))
