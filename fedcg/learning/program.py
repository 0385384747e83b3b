"""A user's program, `module:function`: its source files, its digest, and the client that it returns. Torch-free until called.

Its name comes from the owner of this machine, through agent.toml or the command line, and never over the wire.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedcg.errors import is_users, told
from fedcg.learning.errors import LearningError, ProgramError
from fedcg.values import Value

if TYPE_CHECKING:
    from types import ModuleType

    from fedcg.learning.client import Client

PROGRAM_PATTERN = r"^[A-Za-z_][\w.]{0,99}:[A-Za-z_]\w{0,99}$"
PREFIX = "program:"
"""Prefix of a program's name used as a data source."""


class Program(Value):
    """A program, referenced by name.

    Attributes:
        name: `module:function`; the function takes a site's name and returns a `fedcg.Client`.
        folder: searched for the module before installed packages.
    """

    name: str
    folder: Path

    @staticmethod
    def of_source(root: Path) -> Program | None:
        """The program of a data source `FOLDER/program:NAME`; None for other sources."""
        return Program(root.name.removeprefix(PREFIX), root.parent) if root.name.startswith(PREFIX) else None

    @property
    def _top(self) -> str:
        return self.name.partition(":")[0].partition(".")[0]

    def _found(self) -> ModuleSpec | None:
        return PathFinder.find_spec(self._top, [str(self.folder)]) or PathFinder.find_spec(self._top)

    def files(self) -> list[Path]:
        """The source files of the module, or of the whole package that contains it, sorted. Imports nothing.

        Raises:
            ProgramError: there is no such module.
        """
        found = self._found()
        if found is None or found.origin is None:
            raise ProgramError(f"program {self.name}: no module {self._top} in {self.folder}, and none is installed")
        origin = Path(found.origin)
        return sorted(origin.parent.rglob("*.py")) if found.submodule_search_locations else [origin]

    def digest(self) -> str:
        """The sha256 of the source file in hex; for several files, of their names, sizes and contents.

        Raises:
            ProgramError: there is no such module, or it can't be read.
        """
        digest, files = hashlib.sha256(), self.files()
        try:
            if len(files) == 1:
                return hashlib.sha256(files[0].read_bytes()).hexdigest()
            for path in files:
                code = path.read_bytes()
                digest.update(f"{path.relative_to(files[0].parent)}\0{len(code)}\0".encode() + code)
        except OSError as error:
            raise ProgramError(f"program {self.name}: {error}") from error
        return digest.hexdigest()

    def module(self) -> ModuleType:
        """The module, imported from the place where `files` found it.

        Raises:
            ProgramError: the module is missing, or its code raises.
        """
        files, loaded = {one.resolve() for one in self.files()}, sys.modules.get(self._top)
        before = Path(str(getattr(loaded, "__file__", None))).resolve()
        if loaded is not None and before not in files:
            if not is_users(str(before)):
                raise ProgramError(f"program {self.name}: a module of that name is loaded from {before}: rename yours")
            self.forget()  # loaded by another project
        if str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))
        try:
            if self._top not in sys.modules:
                spec = cast(Any, self._found())
                sys.modules[self._top] = module_from_spec(spec)
                spec.loader.exec_module(sys.modules[self._top])
            return importlib.import_module(self.name.partition(":")[0])
        except Exception as error:
            self.forget()
            raise ProgramError(f"program {self.name} can't be imported: {told(error)}") from error

    def forget(self) -> None:
        """Make the next call import the code again."""
        for name in [one for one in sys.modules if one.partition(".")[0] == self._top]:
            del sys.modules[name]

    def sites(self) -> Sequence[str]:
        """The names of the sites: `SITES` in the module.

        Raises:
            ProgramError: as `module`, or `SITES` is missing.
        """
        found = getattr(self.module(), "SITES", None)
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found) or not found:
            raise ProgramError(f'program {self.name}: the module needs a list of names: SITES = ["a", "b", "c", "d"]')
        return found

    def client(self, site: str, seed: int) -> Client:
        """Call the function for a site. The seed sets torch's random numbers, so all sites' networks start from the same weights.

        Raises:
            ProgramError: as `module`, or the function is missing, raises, or does not return a `fedcg.Client`.
        """
        from fedcg.learning.client import Client
        from fedcg.learning.networks.randomness import lent_generators

        name = self.name.partition(":")[2]
        function = getattr(self.module(), name, None)
        if not callable(function):
            raise ProgramError(f"program {self.name}: the module has no function {name}")
        try:
            with lent_generators(seed):
                made = function(site)
        except LearningError as error:
            raise type(error)(f"client {site}: {error}", exit_code=error.exit_code) from error
        except Exception as error:
            raise ProgramError(f"program {self.name}: {name}({site!r}) failed: {told(error)}") from error
        if not isinstance(made, Client):
            raise ProgramError(
                f"program {self.name}: {name}({site!r}) returned a {type(made).__name__}, not a fedcg.Client"
            )
        return made
