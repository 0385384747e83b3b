"""What the commands of a device share: options, exit codes, the configuration, how a command ends with an error. Importing this loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edge_client.config import AgentConfig

FAILED, BAD_INPUT = 1, 2
ConfigOption = Annotated[Path, typer.Option("--config", help="the device's agent.toml")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]


def read_config(path: Path) -> AgentConfig:
    """The device's configuration; a wrong one ends the command with every problem named."""
    from edge_client.config import load_config
    from edge_client.errors import ConfigError

    try:
        return load_config(path, os.environ)
    except ConfigError as error:
        raise ended(error, BAD_INPUT) from error


def ended(error: Exception, code: int) -> typer.Exit:
    """The end of a command, its reason printed on stderr."""
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(code)
