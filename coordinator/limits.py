"""How many refused requests a listener takes, from one address and from all: token buckets, bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from fedcg.listening import network_of

MAX_ADDRESSES = 4096


@dataclass(frozen=True)
class Rate:
    """At most `burst` at once, refilled with `per_s`."""

    burst: int
    per_s: float


PER_ADDRESS = Rate(10, 1 / 6)
ALL = Rate(120, 2.0)


class _Bucket:
    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._left = float(rate.burst)
        self._at = now

    def wait_s(self, now: float) -> float:
        self._refill(now)
        return 0.0 if self._left >= 1.0 else (1.0 - self._left) / self._rate.per_s

    def take(self, now: float) -> None:
        self._refill(now)
        self._left = max(0.0, self._left - 1.0)

    def _refill(self, now: float) -> None:
        self._left = min(float(self._rate.burst), self._left + (now - self._at) * self._rate.per_s)
        self._at = now


class FailureLimits:
    """Counts refusals: who was refused too often has to wait. What succeeds costs nothing, so a roll-out is never slowed.

    Args:
        clock: monotonic seconds.
        per_address: for one IPv4 address, or one IPv6 network of 64 bits.
        everybody: for all together.
    """

    def __init__(self, clock: Callable[[], float], per_address: Rate = PER_ADDRESS, everybody: Rate = ALL) -> None:
        self._clock = clock
        self._rate = per_address
        self._all = _Bucket(everybody, clock())
        self._addresses: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = Lock()

    def wait_s(self, address: str) -> float:
        """Seconds until this address may ask again; 0 when it may now."""
        with self._lock:
            now = self._clock()
            bucket = self._addresses.get(network_of(address))
            return max(self._all.wait_s(now), 0.0 if bucket is None else bucket.wait_s(now))

    def refused(self, address: str) -> None:
        """Count a refusal."""
        with self._lock:
            now, network = self._clock(), network_of(address)
            bucket = self._addresses.setdefault(network, _Bucket(self._rate, now))
            self._addresses.move_to_end(network)
            bucket.take(now)
            self._all.take(now)
            if len(self._addresses) > MAX_ADDRESSES:
                self._addresses.popitem(last=False)
