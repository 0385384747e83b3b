"""When a training process may work: it takes turns with those of the device's other federations, and pauses while the box may not train."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal

from devices.eligibility import EligibilitySettings, Obstacle, Reason, eligibility, is_held
from devices.telemetry import Telemetry
from edge_client.inference_load import InferenceLoad
from fedcg.event_log import EventLog
from fedcg.wire.messages.schemas import NO_ATTEMPT, RoundAttempt

LOOK_AGAIN_S = 0.2
LOW_NICE = 10
LOOK_EVERY_S = 2.0
"""Between two looks at the sensors; a look takes milliseconds."""
LEAST_PAUSE_S = 30.0
"""Of hardware throttling: without load it ends at once, and would begin again with the next step."""


def yield_cpu(priority: Literal["normal", "low", "idle"]) -> None:
    """Let other programs of the box go first, from now on and in all threads that this one starts."""
    if priority == "low":
        os.nice(max(0, LOW_NICE - os.nice(0)))
    elif priority == "idle":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextmanager
def turn(lock: Path, waits: Callable[[], None], working: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the device's training for as long as the context lasts; the kernel releases that of a killed process.

    Args:
        lock: the file; made when it is not there.
        waits: called once when another process holds it.
        working: called again and again while it does, as a sign of life.

    Raises:
        OSError: the file can be neither made nor read.
    """
    try:
        file = lock.open("a")
    except OSError:  # another user's folder, or a read-only one: a lock needs no more than reading
        file = lock.open()
    with file:
        has_waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not has_waited:
                    waits()
                has_waited = True
                working()
                time.sleep(LOOK_AGAIN_S)
        yield


class Pauses:
    """Holds the work between two steps while the box may not train, or has had its share of the time; to be called at every step.

    Args:
        settings: of the box's owner.
        read: reads the sensors.
        working: the sign of life, which goes on during a pause.
        events: the event log, which gets `paused` and `resumed`.
        clock: monotonic seconds.
        now: local time.
        sleep: waits some seconds.
        duty_cycle: share of the time that the work may take, in (0, 1].

    Attributes:
        at: the round attempt that is worked on.
    """

    def __init__(
        self,
        settings: EligibilitySettings,
        read: Callable[[], Telemetry],
        working: Callable[[], None],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        sleep: Callable[[float], None] = time.sleep,
        duty_cycle: float = 1.0,
    ) -> None:
        self.at: RoundAttempt = NO_ATTEMPT
        self._settings = settings
        self._read = read
        self._working = working
        self._events = events
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._idle_per_busy = 1.0 / duty_cycle - 1.0
        self._load = InferenceLoad(settings.inference_url, clock=clock)
        self._looked_at = float("-inf")
        self._stepped_at: float | None = None

    def __call__(self) -> None:
        """A step is done; returns when the next one may begin."""
        self._working()
        if self._idle_per_busy and self._stepped_at is not None:
            self._sleep(min(LOOK_EVERY_S, (self._clock() - self._stepped_at) * self._idle_per_busy))
        self._pause()
        self._stepped_at = self._clock()

    def _pause(self) -> None:
        began = self._clock()
        if began - self._looked_at < LOOK_EVERY_S or (reason := self._look(None)) is None:
            return
        where = {"round": self.at.round, "attempt": self.at.attempt}
        shown: Obstacle | None = None
        while reason is not None:
            if reason.obstacle is not shown:
                shown = reason.obstacle
                self._events.write("paused", **where, reason=shown.value, detail=reason.detail)
            self._sleep(LOOK_EVERY_S / 4)
            self._working()
            is_short = shown is Obstacle.THROTTLED and self._clock() - began < LEAST_PAUSE_S
            reason = reason if is_short else self._look(shown)
        self._events.write("resumed", **where, seconds=round(self._clock() - began, 1))

    def _look(self, before: Obstacle | None) -> Reason | None:
        self._looked_at = self._clock()
        settings = self._settings
        held, load = is_held(settings), self._load()
        found = eligibility(self._read(), settings, self._now(), held=held, requests_per_s=load, before=before)
        return found if found is not None and found.obstacle.pauses else None
