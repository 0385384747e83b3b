"""Finds methods and the entry points of a group by name, built-in and in installed packages, without importing them. Torch-free.

A method is a file `fedcg/learning/methods/NAME.py` that defines `METHOD`, or an entry point in the group
`fedcg.methods` (NAME to `module:METHOD`).
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedcg.learning.errors import ExtensionError, UnknownMethodError

if TYPE_CHECKING:
    from fedcg.learning.method import Method


@functools.cache  # reading takes milliseconds, and installed packages do not change while a process runs
def registered(group: str, built_in: frozenset[str]) -> Mapping[str, str]:
    """The installed entry points of a group (`fedcg.splits`, `fedcg.methods`, `fedcg.generators`): name to `module:attribute`.

    Args:
        group: name of the entry-point group.
        built_in: names that are already taken.

    Raises:
        ExtensionError: two installed packages use one name for different things, or one uses a built-in name.
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
    """Import a `module:attribute`.

    Raises:
        ExtensionError: it can't be imported.
    """
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ExtensionError(f"{target}: {type(error).__name__}: {error}") from error


ENTRY_POINT_GROUP = "fedcg.methods"
_PACKAGE = "fedcg.learning.methods"


def method_names() -> tuple[str, ...]:
    """Names of all methods, sorted. Reads a directory and the entry points; imports neither torch nor a method.

    Raises:
        ExtensionError: two installed packages use one name for different methods, or one uses the name of a built-in
            method.
    """
    own = _own_names()
    return tuple(sorted(own | registered(ENTRY_POINT_GROUP, own).keys()))


def _own_names() -> frozenset[str]:
    files = (entry.name for entry in resources.files(_PACKAGE).iterdir())
    return frozenset(name[:-3] for name in files if name.endswith(".py") and not name.startswith("_"))


def get_method(name: str) -> Method:
    """The method of that name (imports its file, and so torch).

    Raises:
        UnknownMethodError: no such file or entry point; the message lists the available names.
        ExtensionError: an entry point that can't be imported, or a method whose name differs from its file or entry
            point.
    """
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownMethodError(f"no method {name!r}; choose from {', '.join(names)}.{hint}")
    own = _own_names()
    entry = None if name in own else registered(ENTRY_POINT_GROUP, own)[name]
    method: Method = imported(entry or f"{_PACKAGE}.{name}:METHOD")
    if (found := getattr(method, "name", type(method).__name__)) != name:
        raise ExtensionError(f"method {name}: the METHOD in {entry or f'{name}.py'} is named {found!r}")
    return method
