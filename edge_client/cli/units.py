"""Renders the systemd unit of the agent from the template that is part of the package.

Knows nothing about the agent's work; the unit's hardening and restart rules are in the template.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePosixPath
from string import Template
from typing import Annotated

import typer

from edge_client.cli.shared_options import JsonOption
from fedcg.json_output import print_data

DEFAULT_EXECUTABLE = PurePosixPath("/opt/fedcg/venv/bin/fedcg")
DEFAULT_CONFIG_ROOT = PurePosixPath("/etc/fedcg")
AGENT_UNIT = "fedcg-agent@.service"


def render_agent_unit(
    executable: PurePosixPath = DEFAULT_EXECUTABLE, config_root: PurePosixPath = DEFAULT_CONFIG_ROOT
) -> str:
    """The text of `fedcg-agent@.service`.

    Args:
        executable: Absolute path of the installed `fedcg` command.
        config_root: Absolute path of the folder that holds one device bundle per federation.

    Returns:
        The unit file's content.

    Raises:
        ValueError: When a path is not absolute, or has characters that systemd would interpret.
    """
    for path in (executable, config_root):
        if not path.is_absolute() or set(str(path)) & set(" \t\n%$\"'\\;"):
            raise ValueError(f"{path} must be an absolute path without spaces, quotes, % or $")
    text = files("edge_client.cli").joinpath(f"{AGENT_UNIT}.template").read_text(encoding="utf-8")
    return Template(text).substitute(executable=executable, config_root=config_root)


def unit_command(
    executable: Annotated[
        str, typer.Option("--executable", help="Absolute path of the installed `fedcg` command.")
    ] = str(DEFAULT_EXECUTABLE),
    config_root: Annotated[
        str, typer.Option("--config-root", help="Absolute path of the folder with one bundle per federation.")
    ] = str(DEFAULT_CONFIG_ROOT),
    as_json: JsonOption = False,
) -> None:
    """Print the systemd unit fedcg-agent@.service.

    Example: fedcg agent unit --config-root /etc/fedcg
    """
    try:
        text = render_agent_unit(PurePosixPath(executable), PurePosixPath(config_root))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_data({"unit": AGENT_UNIT, "text": text})
    else:
        typer.echo(text, nl=False)
