"""What was refused, counted by reason and written to the event log; a flood costs ever fewer lines."""

from __future__ import annotations

import threading
from collections import Counter

from fedcg.event_log import EventLog
from fedcg.wire.errors import WireError

ALWAYS_TOLD = 50  # of each reason; afterwards only when their number has doubled: a flood must not fill the disk


class Refusals:
    """Counts refusals of one process, from any thread.

    Args:
        events: gets a line `refused {what, reason, detail, count}`, where `count` is the number of that reason so far.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """How many were refused since the start, by reason."""
        with self._lock:
            return dict(self._counts)

    def note(self, what: str, error: Exception) -> bool:
        """Count a refusal under the reason of its error; what was refused outside the wire counts under `what`.

        Returns:
            Whether it was worth a line.
        """
        reason = error.reason if isinstance(error, WireError) else what
        with self._lock:
            self._counts[reason] += 1
            count = self._counts[reason]
        is_told = count <= ALWAYS_TOLD or count & (count - 1) == 0
        if is_told:
            self._events.write("refused", what=what, reason=reason, detail=str(error), count=count)
        return is_told
