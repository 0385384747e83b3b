"""Token buckets, and with them how many refused requests a listener takes, from one address and from all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedcg.listening import network_of

MAX_KEYS = 4096
"""Buckets that are remembered; one that was not used for the longest time is full again."""

KeyT = TypeVar("KeyT")


class Buckets(Generic[KeyT]):
    """A token bucket for each key; a new one is full. Bounded in number, and not for two threads at once.

    Args:
        per_s: tokens that a bucket gains in a second.
        at_once: tokens that it holds at most.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._clock = clock
        self._levels: dict[KeyT, tuple[float, float]] = {}  # the one that was used last at the end

    def take(self, key: KeyT) -> bool:
        """Take a token; False when there is none."""
        level = self._level(key)
        self.forget(key)
        self._levels[key] = (level - 1.0 if level >= 1.0 else level, self._clock())
        if len(self._levels) > MAX_KEYS:
            self.forget(next(iter(self._levels)))
        return level >= 1.0

    def wait_s(self, key: KeyT) -> float:
        """Seconds until there is a token."""
        return max(0.0, 1.0 - self._level(key)) / self._per_s

    def forget(self, key: KeyT) -> None:
        """Fill a key's bucket."""
        self._levels.pop(key, None)

    def _level(self, key: KeyT) -> float:
        now = self._clock()
        level, at = self._levels.get(key, (self._at_once, now))
        return min(self._at_once, level + self._per_s * (now - at))


@dataclass(frozen=True)
class Rate:
    """At most `burst` at once, refilled with `per_s`."""

    burst: int
    per_s: float


PER_ADDRESS = Rate(10, 1 / 6)
ALL = Rate(120, 2.0)


class FailureLimits:
    """Counts refusals: who was refused too often has to wait. What succeeds costs nothing, so a roll-out is never slowed.

    Args:
        clock: monotonic seconds.
        per_address: for one IPv4 address, or one IPv6 network of 64 bits.
        everybody: for all together.
    """

    def __init__(self, clock: Callable[[], float], per_address: Rate = PER_ADDRESS, everybody: Rate = ALL) -> None:
        self._addresses: Buckets[str] = Buckets(per_address.per_s, per_address.burst, clock)
        self._all: Buckets[None] = Buckets(everybody.per_s, everybody.burst, clock)

    def wait_s(self, address: str) -> float:
        """Seconds until this address may ask again; 0 when it may now."""
        return max(self._all.wait_s(None), self._addresses.wait_s(network_of(address)))

    def refused(self, address: str) -> None:
        """Count a refusal."""
        self._addresses.take(network_of(address))
        self._all.take(None)
