"""What the commands of a device share: options, the configuration and the private store. Importing this loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edge_client.config import AgentConfig
    from edge_client.store.private_store import PrivateStore

ConfigOption = Annotated[Path, typer.Option("--config", envvar="FEDCG_CONFIG", help="The device's agent.toml.")]


def read_config(path: Path) -> AgentConfig:
    """The device's configuration.

    Raises:
        ConfigError: names every problem in it.
    """
    from edge_client.config import load_config

    return load_config(path, os.environ)


@contextmanager
def alone_with_store(settings: AgentConfig) -> Iterator[PrivateStore]:
    """The store, while no agent and no training process uses it."""
    from edge_client.store.private_store import existing_store, open_store

    existing_store(settings)
    store = open_store(settings)
    with store.alone():
        yield store
