"""What the commands of a device share: options and the configuration. Importing this loads no torch."""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcg.errors import BadInputError

if TYPE_CHECKING:
    from edge_client.config import AgentConfig

ConfigOption = Annotated[Path, typer.Option("--config", help="the device's agent.toml")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]

_SPAN = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(text: str, option: str) -> int:
    """The seconds of a span such as 30m.

    Raises:
        BadInputError: the option names none.
    """
    if (span := _SPAN.fullmatch(text)) is None:
        raise BadInputError(f"{option} {text}: give 90s, 30m, 2h or 3d")
    return int(span[1]) * _SECONDS[span[2]]


def moment_of(text: str, now: float, option: str) -> float:
    """The time that an option names, in unix seconds: so long before `now`, or a date.

    Raises:
        BadInputError: it names none.
    """
    if _SPAN.fullmatch(text):
        return now - seconds_of(text, option)
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 reads no Z
    except ValueError as error:
        raise BadInputError(f"{option} {text}: give 10m, 2h, 3d, or a time such as 2026-11-22T08:00") from error
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()


def read_config(path: Path) -> AgentConfig:
    """The device's configuration.

    Raises:
        ConfigError: names every problem in it.
    """
    from edge_client.config import load_config

    return load_config(path, os.environ)
