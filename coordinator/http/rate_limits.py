"""How many refused requests a listener allows, from one address and from all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.token_buckets import Buckets
from fedcg.listening import network_of


@dataclass(frozen=True)
class Rate:
    """At most `burst` at once, refilled with `per_s`."""

    burst: int
    per_s: float


PER_ADDRESS = Rate(10, 1 / 6)
ALL = Rate(120, 2.0)


class FailureLimits:
    """Counts refusals: an address that was refused too often has to wait. Successes are not counted, so a roll-out is never slowed.

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
