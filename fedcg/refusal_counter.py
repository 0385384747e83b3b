"""Counts refusals by reason and writes them to the event log; a flood causes fewer and fewer lines."""

from __future__ import annotations

import threading
from collections import Counter

from fedcg.event_log import EventLog, log_text
from fedcg.wire.errors import WireError

ALWAYS_REPORTED = (
    50  # of each reason and device; afterwards only when their number has doubled: a flood must not fill the disk
)

MAX_TEXT = 200  # characters; topics and fields that a sender chose can be long


class Refusals:
    """Counts refusals of one process, from any thread.

    Args:
        events: gets a line `refused {what, reason, detail, count}`, where `count` is the number of that reason so far, of the
            same device where there are several.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by device and reason

    @property
    def counts(self) -> dict[str, int]:
        """The number of refusals since the start, by reason."""
        totals: Counter[str] = Counter()
        with self._lock:
            for (_, reason), count in self._counts.items():
                totals[reason] += count
        return dict(totals)

    def of(self, device: str) -> int:
        """How many of a device were refused since the start."""
        with self._lock:
            return sum(count for (name, _), count in self._counts.items() if name == device)

    def note(self, what: str, error: Exception, device: str = "") -> bool:
        """Count a refusal under the reason of its error; a refusal outside the wire counts under `what`.

        Args:
            what: was refused.
            error: why.
            device: the sender, where several are known; a name that was not checked would take memory.

        Returns:
            Whether a line was written.
        """
        reason = error.reason if isinstance(error, WireError) else what
        with self._lock:
            self._counts[device, reason] += 1
            count = self._counts[device, reason]
        is_reported = count <= ALWAYS_REPORTED or count & (count - 1) == 0
        if is_reported:
            self._events.write(
                "refused",
                what=log_text(what, MAX_TEXT),
                reason=reason,
                detail=log_text(str(error), MAX_TEXT),
                count=count,
            )
        return is_reported
