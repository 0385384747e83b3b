"""What installed packages add: entry points, name to `module:attribute`. Nothing is imported to list them; torch-free."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from fedcg.learning.errors import ExtensionError


@functools.cache  # reading it takes milliseconds, and what is installed does not change while a process runs
def registered(group: str, built_in: frozenset[str]) -> Mapping[str, str]:
    """Names of a group (`fedcg.splits`, `fedcg.methods`, `fedcg.generators`) that are installed here, to `module:attribute`.

    Args:
        group: of entry points.
        built_in: names that have a meaning already.

    Raises:
        ExtensionError: two installed packages give one name to different things, or one has the name of something built in.
    """
    found: dict[str, str] = {}
    for entry in sorted(entry_points(group=group)):
        if entry.name in built_in:
            raise ExtensionError(
                f"an installed package registers {entry.name!r} in {group} as {entry.value}, and that name is built in; "
                "give the entry another name, or uninstall the package"
            )
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise ExtensionError(
                f"two installed packages register {entry.name!r} in {group}: {found[entry.name]} and {entry.value}; "
                "uninstall one of them"
            )
    return MappingProxyType(found)


def imported(target: str) -> Any:
    """What a `module:attribute` names.

    Raises:
        ExtensionError: it can't be imported.
    """
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ExtensionError(f"{target}: {type(error).__name__}: {error}") from error
