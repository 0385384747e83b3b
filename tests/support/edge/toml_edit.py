"""Set values in a TOML file made of plain `[table]` sections, leaving everything else as it is."""

from collections.abc import Mapping
from pathlib import Path

from fedcg import config_file


def set_values(path: Path, values: Mapping[tuple[str, str], str | bool | float | list[str]]) -> None:
    path.write_text(config_file.set_values(path.read_text(), values))
