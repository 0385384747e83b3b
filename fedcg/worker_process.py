"""Notices a process that is there and does nothing: stopped, dead-locked, or waiting for a driver for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.5
START_S = 120.0
STALL_S = 900.0
"""Longer than the slowest step, load or merge that is worth waiting for."""


class Watchdog:
    """The last sign of life of a process, while it has something to do.

    Args:
        stall_s: silence after which it counts as hanging.
        clock: monotonic seconds.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._alive_at: float | None = None
        self.started()

    @property
    def reason(self) -> str:
        """Why a hanging process is ended, for people."""
        return f"no progress for {self._stall_s:g} s"

    def started(self) -> None:
        """It was started: until its first sign of life it loads torch, which takes its time on a busy box."""
        self._alive_at = self._clock() + max(0.0, START_S - self._stall_s)

    def alive(self) -> None:
        """It gave a sign of life, or was given something to do."""
        self._alive_at = self._clock()

    def rest(self) -> None:
        """It has nothing to do, so it may be silent."""
        self._alive_at = None

    def is_hanging(self) -> bool:
        """Whether it has been silent for too long."""
        return self._alive_at is not None and self._clock() - self._alive_at > self._stall_s
