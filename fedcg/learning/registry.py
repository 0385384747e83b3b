"""Finds methods by name, without importing them.

They are files `fedcg/learning/methods/NAME.py`, which hold `METHOD`, and what installed packages register in the entry-point group
`fedcg.methods` (NAME to `module:METHOD`).
"""

from __future__ import annotations

import difflib
from importlib import import_module, resources
from typing import TYPE_CHECKING

from fedcg.learning.errors import ExtensionError, UnknownMethodError
from fedcg.learning.extensions import imported, registered

if TYPE_CHECKING:
    from fedcg.learning.method import Method

ENTRY_POINT_GROUP = "fedcg.methods"
_PACKAGE = "fedcg.learning.methods"


def method_names() -> tuple[str, ...]:
    """Names of all methods, sorted. Reads a directory and the entry points; imports neither torch nor a method.

    Raises:
        ExtensionError: two installed packages give one name to different methods, or one has the name of a built-in method.
    """
    own = _own_names()
    return tuple(sorted(own | registered(ENTRY_POINT_GROUP, own).keys()))


def _own_names() -> frozenset[str]:
    files = (entry.name for entry in resources.files(_PACKAGE).iterdir())
    return frozenset(name[:-3] for name in files if name.endswith(".py") and not name.startswith("_"))


def get_method(name: str) -> Method:
    """The method of that name (imports its file, and so torch).

    Raises:
        UnknownMethodError: no such file or entry; the message lists the names there are.
        ExtensionError: an entry that can't be imported, or a method that has another name than its file or entry.
    """
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownMethodError(f"no method {name!r}; there are {', '.join(names)}.{hint}")
    own = _own_names()
    entry = None if name in own else registered(ENTRY_POINT_GROUP, own)[name]
    method: Method = import_module(f"{_PACKAGE}.{name}").METHOD if entry is None else imported(entry)
    if method.name != name:
        raise ExtensionError(f"method {name}: the METHOD that {entry or f'{name}.py'} holds is named {method.name!r}")
    return method
