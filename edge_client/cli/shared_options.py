"""What the commands of a device share: options and the configuration. Importing this loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edge_client.config import AgentConfig

ConfigOption = Annotated[Path, typer.Option("--config", envvar="FEDCG_CONFIG", help="The device's agent.toml.")]


def read_config(path: Path) -> AgentConfig:
    """The device's configuration.

    Raises:
        ConfigError: names every problem in it.
    """
    from edge_client.config import load_config

    return load_config(path, os.environ)
