"""`fedcg new`: a project folder to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedcg.terminal import Result, prints


@prints
def new_command(
    name: Annotated[Path, typer.Argument(help="The new folder.")],
    template: Annotated[
        Literal["images", "signals", "tables", "trainer"], typer.Option(help="What the sites' data and task are.")
    ] = "images",
) -> Result:
    """Make a project: client.py with your network and data, a plan that follows from it, pyproject.toml, README, a test.

    Exit codes: 0 made; 2 bad input; 6 the folder is there already.

    Example: fedcg new vibration --template signals
    """
    from fedcg.learning.project import new_project

    made = new_project(name, template)
    listed = "\n".join(f"  {path}" for path in made)
    text = f"{name}:\n{listed}\nNext: fedcg simulate {name}; then put your network and data into {name / 'client.py'}"
    return {"folder": str(name), "files": [str(path) for path in made]}, text
