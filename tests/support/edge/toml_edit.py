"""Set values in a TOML file made of plain `[table]` sections, leaving everything else as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def set_values(path: Path, values: Mapping[tuple[str, str], str | bool | float | list[str]]) -> None:
    lines = path.read_text().splitlines()
    for (table, key), value in values.items():
        lines = _set(lines, table, key, f"{key} = {json.dumps(value)}")
    path.write_text("\n".join(lines) + "\n")


def _set(lines: list[str], table: str, key: str, line: str) -> list[str]:
    header = f"[{table}]"
    if header not in lines:
        return [*lines, "", header, line]
    start = lines.index(header) + 1
    end = next((index for index in range(start, len(lines)) if lines[index].startswith("[")), len(lines))
    for index in range(start, end):
        if lines[index].split("=")[0].strip() == key:
            return [*lines[:index], line, *lines[index + 1 :]]
    return [*lines[:start], line, *lines[start:]]
