"""Waits for another thread or process."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        pause.wait(0.005)


def await_ends(processes: Mapping[str, subprocess.Popen[bytes]], tail: Callable[[str], str], deadline_s: float) -> None:
    """Check that every process ends with exit code 0; else AssertionError with the tail of its log."""
    end = time.monotonic() + deadline_s
    for name, process in processes.items():
        try:
            code = process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not finish: {tail('coordinator')} {tail(name)}") from None
        assert code == 0, f"{name}: exit code {code}: {tail(name)}"


def free_port() -> int:
    """Return a TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
