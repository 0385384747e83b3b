"""`fedcg new`: creates a project folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedcg.terminal import Result, prints


@prints
def new_command(
    name: Annotated[Path, typer.Argument(help="The new folder.")],
    template: Annotated[
        Literal["images", "signals", "tables", "trainer"], typer.Option(help="The kind of data and task.")
    ] = "images",
) -> Result:
    """Create a project: client.py for your network and data, a matching plan, pyproject.toml, a README and a test.

    Exit codes: 0 created; 2 bad input; 6 folder exists.

    Example: fedcg new vibration --template signals
    """
    from fedcg.learning.project import new_project

    made = new_project(name, template)
    listed = "\n".join(f"  {path}" for path in made)
    text = f"{name}:\n{listed}\nNext: fedcg simulate {name}; then put your network and data into {name / 'client.py'}"
    return {"folder": str(name), "files": [str(path) for path in made]}, text
