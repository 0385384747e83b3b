"""Progress of a local round as events: the start of each phase, its first step, then at most five lines a second."""

from __future__ import annotations

from collections.abc import Callable

from fedcg.event_log import EventLog
from fedcg.wire.messages.messages import RoundAttempt

EVERY_S = 0.2


class ProgressEvents:
    """A progress callback for one round attempt.

    Args:
        events: where the lines go.
        attempt: the round attempt.
        pid: of the process that trains.
        clock: monotonic seconds.
        working: called at every step, for the supervision of the process.
    """

    def __init__(
        self,
        events: EventLog,
        attempt: RoundAttempt,
        pid: int,
        clock: Callable[[], float],
        working: Callable[[], None] = lambda: None,
    ) -> None:
        self._events = events
        self._about = {"round": attempt.round, "attempt": attempt.attempt, "pid": pid}
        self._clock = clock
        self._working = working
        self._phase = ""
        self._written_at = 0.0

    def __call__(self, phase: str, step: int, steps: int) -> None:
        """Record a step that is done."""
        self._working()
        now = self._clock()
        is_new = phase != self._phase
        if is_new:
            self._phase = phase
            self._events.write("phase_started", phase=phase, **self._about)
        if step > 0 and (is_new or step == steps or now - self._written_at >= EVERY_S):
            self._written_at = now
            self._events.write("progress", phase=phase, step=step, steps=steps, **self._about)

    def named(self, prefix: str) -> Callable[[str, int, int], None]:
        """The same callback for work beside the round itself, e.g. `shadow-classify`."""
        return lambda phase, step, steps: self(f"{prefix}-{phase}", step, steps)
