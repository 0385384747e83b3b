"""What devices report of themselves: clocks, readings and agent processes in memory, the condition in the database, which outlives the service."""

from __future__ import annotations

from collections import deque

from coordinator.storage.store import Store
from fedcg.wire.messages.conditions import Readings
from fedcg.wire.messages.messages import SelfReport

BOOTS_KEPT = 8


class ConditionBoard:
    """Keeps the last self-report of each device of one federation; times are unix seconds.

    Attributes:
        clock_ahead_s: by device, how far its clock is ahead of the coordinator's, in seconds; behind is negative.
        readings: by device, of its sensors, and when they came; left out of the database, as each session brings new ones.
        remembered: by device, from its last hello, the highest epoch, the last trained round, and whether this coordinator has the key that it accepts.
        doubled_at: by device, when an agent process of it came back after another one had reported: both are alive.
    """

    def __init__(self, store: Store, federation: str) -> None:
        self._store = store
        self._federation = federation
        self._boots: dict[str, deque[str]] = {}
        self._kept: dict[str, str] = {}
        self.clock_ahead_s: dict[str, float] = {}
        self.readings: dict[str, tuple[float, Readings]] = {}
        self.remembered: dict[str, tuple[int, int, bool]] = {}
        self.doubled_at: dict[str, float] = {}

    def note(self, device: str, report: SelfReport, now: float, *, is_delayed: bool) -> None:
        """Take a self-report.

        Args:
            device: the sender.
            report: its message.
            now: unix time.
            is_delayed: it may have waited behind chunks of an update, so its clock is not compared.
        """
        if report.clock is None:
            self.clock_ahead_s.pop(device, None)
        elif not is_delayed:
            self.clock_ahead_s[device] = report.clock - now
        if report.telemetry is None:
            self.readings.pop(device, None)
        else:
            self.readings[device] = now, report.telemetry
        boots = self._boots.setdefault(device, deque(maxlen=BOOTS_KEPT))
        if report.boot in boots and boots[-1] != report.boot:
            self.doubled_at[device] = now
            boots.remove(report.boot)
        if report.boot not in boots:
            boots.append(report.boot)
        content = report.condition.model_dump_json()
        if self._kept.get(device) != content and self._store.device(device) is not None:
            self._kept[device] = content
            self._store.presence.keep_condition(self._federation, device, now, content)
