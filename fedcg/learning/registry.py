"""Finds methods by their file names, without importing them: `fedcg/learning/methods/NAME.py` holds `METHOD`."""

from __future__ import annotations

import difflib
from importlib import import_module, resources
from typing import TYPE_CHECKING

from fedcg.learning.errors import UnknownMethodError

if TYPE_CHECKING:
    from fedcg.learning.method import Method

_PACKAGE = "fedcg.learning.methods"


def method_names() -> tuple[str, ...]:
    """Names of all methods, sorted. Reads a directory; imports neither torch nor a method."""
    files = (entry.name for entry in resources.files(_PACKAGE).iterdir())
    return tuple(sorted(name[:-3] for name in files if name.endswith(".py") and not name.startswith("_")))


def get_method(name: str) -> Method:
    """The method of that name (imports its file, and so torch).

    Raises:
        UnknownMethodError: no such file; the message lists the names there are.
    """
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownMethodError(f"no method {name!r}; there are {', '.join(names)}.{hint}")
    method: Method = import_module(f"{_PACKAGE}.{name}").METHOD
    return method
