"""One way to wait for what another thread or process does."""

import socket
import threading
import time
from collections.abc import Callable

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        pause.wait(0.005)


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
