"""Ending what may hang, without letting it hold up the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


def on_daemon(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run something that may hang on a thread that nobody waits for at exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finished() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        try:
            work()
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finished)

    threading.Thread(target=run, name="closing", daemon=True).start()
    return done
