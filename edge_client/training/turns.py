"""Training processes of one device take turns: each federation has one, and they share the GPU and the processors."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_AGAIN_S = 0.2


@contextmanager
def turn(lock: Path, waits: Callable[[], None], working: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the device's training for as long as the context lasts; the kernel releases that of a killed process.

    Args:
        lock: the file; made when it is not there.
        waits: called once when another process holds it.
        working: called again and again while it does, as a sign of life.

    Raises:
        OSError: the file can be neither made nor read.
    """
    try:
        file = lock.open("a")
    except OSError:  # another user's folder, or a read-only one: a lock needs no more than reading
        file = lock.open()
    with file:
        has_waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not has_waited:
                    waits()
                has_waited = True
                working()
                time.sleep(LOOK_AGAIN_S)
        yield
