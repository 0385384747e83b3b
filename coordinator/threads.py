"""Pools of threads, one for each kind of blocking work: who waits for a lock or a disk holds up only work of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A bounded pool. Work of the round engine has asyncio's own; nothing else may use that.

    Args:
        name: of its threads.
        count: how many.
    """

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Do something that blocks, once a thread is free."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *arguments, **named))
