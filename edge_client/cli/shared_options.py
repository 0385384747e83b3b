"""Shared by the commands of a device: options, configuration and private store. Importing this module loads no torch."""

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

ConfigOption = Annotated[Path, typer.Option("--config", envvar="FEDCG_CONFIG", help="Path of the device's agent.toml.")]


def read_config(path: Path) -> AgentConfig:
    """The device's configuration.

    Raises:
        ConfigError: lists every problem in the file.
    """
    from edge_client.config import load_config

    return load_config(path, os.environ)


@contextmanager
def alone_with_store(settings: AgentConfig) -> Iterator[PrivateStore]:
    """The store, locked against the agent and the training process."""
    from edge_client.store.private_store import existing_store, open_store

    existing_store(settings)
    store = open_store(settings)
    with store.alone():
        yield store
