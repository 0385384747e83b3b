"""How the HTTPS listeners for devices refuse a request: the answer, and an event now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastapi import Response

from coordinator.token_buckets import Buckets
from fedcg.event_log import EventLog
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
