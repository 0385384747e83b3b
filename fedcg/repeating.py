"""Work that is done again and again beside a program, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(name: str, work: Callable[[], float]) -> Iterator[None]:
    """Do the work for as long as the context lasts; its end does not wait for work that is under way.

    Args:
        name: of the thread.
        work: returns how many seconds to wait before the next time; must catch its own errors.
    """
    stopping = threading.Event()

    def run() -> None:
        pause_s = 0.0
        while not stopping.wait(pause_s):
            pause_s = work()

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        yield
    finally:
        stopping.set()
