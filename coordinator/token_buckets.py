"""Token buckets: how often something may happen, by key."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_KEYS = 4096
"""Buckets that are remembered; one that was not used for the longest time is full again."""

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Rate:
    """At most `burst` at once, refilled with `per_s`."""

    burst: int
    per_s: float


class Buckets(Generic[KeyT]):
    """A token bucket for each key; a new one is full. Bounded in number; for any thread.

    Args:
        rate: tokens that a bucket holds at most, and gains in a second.
        clock: monotonic seconds.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._levels: dict[KeyT, tuple[float, float]] = {}  # the one that was used last at the end

    def take(self, key: KeyT) -> bool:
        """Take a token; False when there is none."""
        with self._lock:
            level = self._level(key)
            self._levels.pop(key, None)
            self._levels[key] = (level - 1.0 if level >= 1.0 else level, self._clock())
            if len(self._levels) > MAX_KEYS:
                del self._levels[next(iter(self._levels))]
            return level >= 1.0

    def wait_s(self, key: KeyT) -> float:
        """Seconds until there is a token."""
        with self._lock:
            return max(0.0, 1.0 - self._level(key)) / self._rate.per_s

    def give_back(self, key: KeyT) -> None:
        """Put a token back that was taken."""
        with self._lock:
            self._levels[key] = (min(self._rate.burst, self._level(key) + 1.0), self._clock())

    def forget(self, key: KeyT) -> None:
        """Fill a key's bucket."""
        with self._lock:
            self._levels.pop(key, None)

    def _level(self, key: KeyT) -> float:
        now = self._clock()
        level, at = self._levels.get(key, (self._rate.burst, now))
        return min(self._rate.burst, level + self._rate.per_s * (now - at))
