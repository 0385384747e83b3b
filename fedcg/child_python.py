"""How Pythons of this program start: they import nothing from the folder that they start in, and load their packages fast.

`python -m` and `python -c` put that folder in front of the path, so a `torch.py` or a `fedcg` that lies there would run in a child.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import SpawnContext
from pathlib import Path

_AS_MODULE = (  # what -P and -m do together
    "import sys; del sys.path[0]; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str | Path | int) -> list[str]:
    """The command line that runs a module in this same Python, which has the option -P from 3.11 on."""
    run = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _AS_MODULE]
    return [sys.executable, *run, module, *map(str, arguments)]


def spawning() -> SpawnContext:
    """The context for pools of processes, which pass no options on, but the environment.

    It has no effect in Python 3.10, where a box has only a `fedcg.worker_process`.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    return get_context("spawn")


@contextmanager
def loading() -> Iterator[None]:
    """Import without garbage collections in between, an eighth of the time: packages leave no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
