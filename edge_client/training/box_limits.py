"""The device's limits for training: turns, pauses, and the share of a batch that fits the memory. Torch-free.

Training takes turns with the device's other federations. It pauses while the device may not train or is serving predictions.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from devices.eligibility import EligibilitySettings, Reason, obstacles
from devices.files import oom_kills
from devices.telemetry import Telemetry
from edge_client.errors import StoreError
from edge_client.store.checked_files import read_json, write_json
from fedcg.event_log import EventLog
from fedcg.files import take_lock
from fedcg.wire.messages.schemas import NO_ATTEMPT, DeclineReason, RoundAttempt

LOOK_AGAIN_S = 0.2
LOW_NICE = 10
LOOK_EVERY_S = 2.0
"""Time between two sensor readings, which take milliseconds."""
LEAST_PAUSE_S = 30.0
"""Minimum pause for hardware throttling, which ends immediately without load and would start again with the next step."""


def yield_cpu(priority: Literal["normal", "low", "idle"]) -> None:
    """Lower the priority of this thread and of all threads that it starts."""
    if priority == "low":
        os.nice(max(0, LOW_NICE - os.nice(0)))
    elif priority == "idle":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextmanager
def turn(lock: Path, waits: Callable[[], None], working: Callable[[], None]) -> Iterator[None]:
    """Hold the device's training lock while the context is open. The kernel releases a killed process's lock.

    Args:
        lock: the lock file; created if missing.
        waits: called once if another process holds it.
        working: called repeatedly while waiting, as a sign of life.

    Raises:
        OSError: the file can be neither created nor read.
    """
    try:
        file = lock.open("a")
    except OSError:  # another user's or a read-only folder: reading is enough for a lock
        file = lock.open()
    with file:
        is_held = take_lock(file)
        if not is_held:
            waits()
        while not is_held:
            working()
            time.sleep(LOOK_AGAIN_S)
            is_held = take_lock(file)
        yield


@dataclass(eq=False)
class Pauses:
    """Pauses the work between two steps while the device may not train, or to respect the duty cycle. Call it at every step.

    Args:
        settings: of the device's owner.
        read: reads the sensors.
        working: the sign of life, which continues during a pause.
        events: the event log, for `paused` and `resumed`.
        clock: monotonic seconds.
        now: local time.
        sleep: sleeps for some seconds.
        duty_cycle: share of time for the work, in (0, 1].

    Attributes:
        at: the current round attempt.
    """

    settings: EligibilitySettings
    read: Callable[[], Telemetry]
    working: Callable[[], None]
    events: EventLog
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = datetime.now
    sleep: Callable[[float], None] = time.sleep
    duty_cycle: float = 1.0
    _stepped_at: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.at: RoundAttempt = NO_ATTEMPT
        self._idle_per_busy = 1.0 / self.duty_cycle - 1.0
        self._looked_at = float("-inf")

    def __call__(self) -> None:
        """Call after a step. Returns when the next one may start."""
        self.working()
        if self._idle_per_busy and self._stepped_at is not None:
            self.sleep(min(LOOK_EVERY_S, (self.clock() - self._stepped_at) * self._idle_per_busy))
        self._pause()
        self._stepped_at = self.clock()

    def _pause(self) -> None:
        began = self.clock()
        if began - self._looked_at < LOOK_EVERY_S or (reason := self._look(None)) is None:
            return
        shown: DeclineReason | None = None
        while reason is not None:
            if reason.obstacle is not shown:
                shown = reason.obstacle
                self.events.write("paused", **vars(self.at), reason=shown.value, detail=reason.detail)
            self.sleep(LOOK_EVERY_S / 4)
            self.working()
            is_short = shown is DeclineReason.THROTTLED and self.clock() - began < LEAST_PAUSE_S
            reason = reason if is_short else self._look(shown)
        self.events.write("resumed", **vars(self.at), seconds=round(self.clock() - began, 1))

    def _look(self, before: DeclineReason | None) -> Reason | None:
        self._looked_at = self.clock()
        found = next(iter(obstacles(self.read(), self.settings, self.now(), before=before)), None)
        return found if found is not None and found.pauses else None


MEMORY_FILE = "memory.json"
LEAST_SHARE = 1 / 128
"""Smallest share of a batch. If even this does not fit, training is impossible."""
NEAR_END_BYTES = 256 << 20
"""Memory counts as nearly exhausted with less than this available: about what a step of the larger networks allocates at once."""
MOST_FAILURES = 3
_log = logging.getLogger(__name__)


class MemoryShare:
    """The share of a batch that fits into memory, saved in `memory.json` of a private store. Discarded if the memory size changes.

    A process can't report that the kernel killed it. So it saves the kernel's count of out-of-memory kills before a round. If the next process
    finds the round unfinished and a higher count in the same boot, memory was the reason. Other kills and power cuts don't change the share.

    Other failures are counted if memory was nearly exhausted in their round. After three of them without a successful round in between, the
    share is halved.

    The available memory is only used before the first round. Afterwards the saved share is used, so that a repeated round is divided in the same
    way, whatever else is running. Deleting the file resets it.

    Args:
        store: folder of the private store.
        planned: the share for the installed memory (`devices.profile`).
        memory: the place of training and its memory in bytes.
        root: of the file tree that describes the device.
        at_first: the share for the available memory, if none is saved; None: `planned`.

    Attributes:
        share: in (0, 1].
        was_killed: whether the previous process died in a round for lack of memory: killed by the kernel, or the third failure with memory nearly
            exhausted.
    """

    def __init__(
        self, store: Path, planned: float, memory: str, root: Path = Path("/"), at_first: float | None = None
    ) -> None:
        self._path, self._memory, self._root = store / MEMORY_FILE, memory, root
        self.share, self.was_killed = planned if at_first is None else at_first, False
        self._failures, self._was_near, self._in_round = 0, False, ""
        known = self._read()
        if known.get("memory") != memory:
            return
        share, noted = known.get("share"), str(known.get("in_round") or "")
        if isinstance(share, float) and LEAST_SHARE <= share <= 1:
            self.share = min(share, planned)
        (boot, _, before), (boot_now, _, now) = (text.rpartition(" ") for text in (noted, oom_kills(root)))
        counted = bool(boot) and boot == boot_now and before.isdigit() and now.isdigit()
        self.was_killed = counted and int(before) < int(now)
        failures = known.get("failures")
        self._failures = failures if isinstance(failures, int) else 0
        self._was_near = bool(noted) and known.get("near_end") is True
        if self.was_killed:
            self.halve()
        else:
            self.was_killed = self.failed()

    def halve(self) -> bool:
        """Halve the share, unless it is already at its minimum. Returns whether it was halved."""
        if self.share / 2 < LEAST_SHARE:
            return False
        self.share, self._failures = self.share / 2, 0
        self._write("")
        return True

    def round_begins(self) -> None:
        """Record that a round starts."""
        self._was_near = False
        self._write(oom_kills(self._root) or "round")

    def look(self, free_bytes: int | None) -> None:
        """Record, once per round, that memory is nearly exhausted."""
        if self._in_round and not self._was_near and free_bytes is not None and free_bytes < NEAR_END_BYTES:
            self._was_near = True
            self._write(self._in_round)

    def failed(self) -> bool:
        """Count another failure. Returns whether it was the third with memory nearly exhausted, and the share was halved."""
        self._failures += self._was_near
        self._was_near = False
        return self._failures >= MOST_FAILURES and self.halve()

    def round_ended(self, *, well: bool = False) -> None:
        """Record that the round ended, and whether it was successful."""
        self._failures = 0 if well else self._failures
        self._write("")

    def _read(self) -> dict[str, object]:
        try:
            return read_json(self._path)
        except StoreError as error:
            _log.warning("%s; it is recreated", error)
            return {}

    def _write(self, in_round: str) -> None:
        self._in_round = in_round
        known: dict[str, object] = {"memory": self._memory, "share": float(self.share), "in_round": in_round}
        known |= {"near_end": self._was_near, "failures": self._failures}
        try:
            write_json(self._path, known)
        except OSError as error:  # a full disk: the round continues without this record
            _log.warning("%s can't be written: %s", self._path.name, error)
