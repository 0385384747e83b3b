"""Runs the command `fedcg` inside a test's process or in one of its own, and names all that it has."""

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
    """`fedcg` with these words: its exit code, what it printed on stdout and stderr. Log handlers that it installs go with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return CliRunner().invoke(fedcg, [str(word) for word in words], input=typed, env=environment)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def succeeds(*words: object, typed: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command that ends with exit code 0 writes to stdout."""
    ended = run_fedcg(*words, typed=typed, environment=environment)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def fails(code: int, *words: object, typed: str | None = None) -> str:
    """What a command that ends with this exit code writes to stderr, on one line."""
    ended = run_fedcg(*words, typed=typed)
    assert ended.exit_code == code, ended.output
    return " ".join(ended.stderr.split())


def start_fedcg(*words: object) -> subprocess.Popen[str]:
    """A `fedcg` command on one thread, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedcg", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    """What a command printed on stderr until its good end."""
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return errors


def data_of(output: str | bytes) -> Any:
    """The data in the one envelope that a command printed with `--json`; a failure of the command fails the test."""
    envelope = json.loads(output.splitlines()[0])
    assert envelope["ok"] is True, envelope
    return envelope["data"]


def commands_of(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a command line's whole or a group of it, with its words."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    for inner in command.list_commands(None):
        yield from commands_of(command.get_command(None, inner), (*name, inner))
