"""Pools of threads, one for each kind of blocking work: who waits for a lock or a disk holds up only work of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A bounded pool. The round engine works on asyncio's own (`asyncio.to_thread`), which nothing else may use."""

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do something that blocks, once a thread is free."""
        return await asyncio.get_running_loop().run_in_executor(self, work, *arguments)
