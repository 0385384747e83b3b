"""The state of the agent for systemd (`Type=notify`, `WatchdogSec=`): datagrams to $NOTIFY_SOCKET; without it nothing is sent.

Source: sd_notify(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping


class ServiceManager:
    """Reports to the service manager that started this process.

    Args:
        environment: of this process.
        clock: monotonic seconds.
    """

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._clock = clock
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = int(limit_us) / 1e6 / 3 if watched and limit_us.isdecimal() else None
        self._alive_at = float("-inf")
        self._status = ""

    def ready(self) -> None:
        """The agent runs."""
        self._send("READY=1")

    def alive(self, status: str) -> None:
        """The loop turns; sends a sign of life three times within the watchdog's limit, and the status when it changes."""
        now, lines = self._clock(), []
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}".replace("\n", " "))
        if self._every_s is not None and now - self._alive_at >= self._every_s:
            self._alive_at = now
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))

    def stopping(self) -> None:
        """The agent is about to end."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.settimeout(1.0)
            with contextlib.suppress(OSError):  # a report to a manager that does not take it changes nothing
                manager.sendto(state.encode(), self._address)
