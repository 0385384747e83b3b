"""Runs the command `fedcg` inside a test's process."""

from __future__ import annotations

from collections.abc import Mapping

from typer.testing import CliRunner, Result

from fedcg.cli import fedcg


def run_fedcg(*words: object, typed: str | None = None, environment: Mapping[str, str] | None = None) -> Result:
    """`fedcg` with these words: its exit code, what it printed on stdout and stderr."""
    return CliRunner().invoke(fedcg, [str(word) for word in words], input=typed, env=environment)
