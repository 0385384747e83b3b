"""Token buckets: rate limits by key."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from fedcg.values import Value

MAX_KEYS = 4096
"""Maximum number of stored buckets. The least recently used one is dropped, so it is full again."""

KeyT = TypeVar("KeyT")


class Rate(Value):
    """At most `burst` tokens at once, refilled at `per_s` tokens per second."""

    burst: int
    per_s: float


class Buckets(Generic[KeyT]):
    """A token bucket for each key; new buckets are full. Limited in number and thread-safe.

    Args:
        rate: capacity and refill rate of a bucket.
        clock: monotonic seconds.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._levels: dict[KeyT, tuple[float, float]] = {}  # most recently used at the end

    def take(self, key: KeyT) -> bool:
        """Take a token; False if no token is left."""
        with self._lock:
            level = self._level(key)
            self._levels.pop(key, None)
            self._levels[key] = (level - 1.0 if level >= 1.0 else level, self._clock())
            if len(self._levels) > MAX_KEYS:
                del self._levels[next(iter(self._levels))]
            return level >= 1.0

    def wait_s(self, key: KeyT) -> float:
        """Seconds until a token is available."""
        with self._lock:
            return max(0.0, 1.0 - self._level(key)) / self._rate.per_s

    def give_back(self, key: KeyT) -> None:
        """Return a taken token."""
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
