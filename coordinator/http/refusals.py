"""Refused requests: the answer of the listeners for devices, an event now and then, and how many of them are allowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import Response

from coordinator.token_buckets import Buckets
from fedcg.event_log import EventLog
from fedcg.listening import network_of
from fedcg.wire.messages.enrolment_messages import Refusal

EVENT_EVERY_S = 10.0
MAX_REASON = 600


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with the reason; the connection ends with it, because a body may be left unread."""
    return Response(
        Refusal(error=reason[:MAX_REASON]).model_dump_json(),
        status,
        {**(headers or {}), "Connection": "close"},
        "application/json",
    )


class CountedEvent:
    """An event that anybody can cause: written once in ten seconds, with the number of times until then.

    Args:
        events: the event log.
        name: of the event.
        clock: monotonic seconds.
    """

    def __init__(self, events: EventLog, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._name = name
        self._lines: Buckets[None] = Buckets(1 / EVENT_EVERY_S, 1, clock)
        self._count = 0

    def count(self, **values: str | None) -> None:
        """Count it, and write it when it is time."""
        self._count += 1
        if self._lines.take(None):
            self._events.write(self._name, refused=self._count, **values)


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
