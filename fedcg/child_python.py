"""Starts child Python processes that import nothing from the working directory and load their packages fast.

`python -m` and `python -c` put the working directory first in the path, so a `torch.py` or `fedcg` in it would run in a child.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import SpawnContext
from pathlib import Path

_AS_MODULE = (  # like -P and -m together
    "import sys; del sys.path[0]; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str | Path | int) -> list[str]:
    """The command line that runs a module in this Python; the option -P exists from 3.11 on."""
    run = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _AS_MODULE]
    return [sys.executable, *run, module, *map(str, arguments)]


def spawning() -> SpawnContext:
    """The context for process pools, which pass on the environment but no options.

    It has no effect in Python 3.10, where a device has only a `fedcg.worker_process`.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    return get_context("spawn")


@contextmanager
def loading() -> Iterator[None]:
    """Import without garbage collection, which takes an eighth of the time: packages leave no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
