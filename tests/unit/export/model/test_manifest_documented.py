"""docs/manifest.md and the manifest's schema name the same fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from export.model.manifest import Manifest

PAGE = (Path(__file__).parents[4] / "docs" / "manifest.md").read_text()
OPAQUE = {"variants.file"}  # described as `model` is


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every field by its path, and whether it must be given; groups that are described by their fields alone are left out."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = [] if path in OPAQUE else list(_models(field.annotation))
        if not inner or not field.is_required():
            yield path, field.is_required()
        for one in inner:
            yield from _fields(one, f"{path}.")


def _described() -> dict[str, bool]:
    """Every field in the table, and whether it has no default there."""
    rows = re.findall(r"^\| (`[^|]+`) \|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)
    return {name: not default.strip() for names, default in rows for name in re.findall(r"`([^`]+)`", names)}


def test_every_field_of_the_schema_is_in_the_table_and_no_other() -> None:
    assert sorted(_described()) == sorted(name for name, _ in _fields(Manifest))


@pytest.mark.parametrize(("name", "is_required"), list(_fields(Manifest)))
def test_the_table_says_which_fields_may_be_missing(name: str, is_required: bool) -> None:
    assert _described()[name] == is_required
