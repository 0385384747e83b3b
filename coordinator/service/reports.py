"""What devices and the worker report: how far training and merge are, and how each device is.

All of it is in memory but the last condition of each device, which outlives the service in the database.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from coordinator.aggregation.jobs import Progressed
from coordinator.rounds.engine import RoundState
from coordinator.storage.store import Store
from fedcg.wire.messages.schemas import Heartbeat, OfAttempt, Readings, SelfReport

BOOTS_KEPT = 8  # agent processes of a device that are told apart


@dataclass(frozen=True)
class DeviceProgress(OfAttempt):
    """How far a device is, by its last heartbeat; times are unix seconds.

    Attributes:
        phase: what its training process does.
        step, steps: how far the phase is.
        since: when the phase was reported first.
        reported_at: when the last heartbeat came.
        ends_at: predicted end of the phase at the rate so far; None before the second report of it.
    """

    phase: str
    step: int
    steps: int
    since: float
    reported_at: float
    ends_at: float | None


@dataclass(frozen=True)
class MergeProgress:
    """How far the worker is with a round, and how its last distillation goes or went.

    Attributes:
        phase: what the worker does: teacher, distil; empty once the merge is over.
        step, steps: how far the phase is.
        losses: (step, mean loss of the last steps) of a distillation, in order; empty for a method without one.
        distilled: the round of that distillation.
    """

    round: int
    phase: str
    step: int
    steps: int
    losses: tuple[tuple[int, float], ...] = ()
    distilled: int = 0

    @staticmethod
    def after(before: MergeProgress | None, report: Progressed) -> MergeProgress:
        """What is known after a report of the worker."""
        losses, distilled = (before.losses, before.distilled) if before is not None else ((), 0)
        if report.loss is not None:
            earlier = losses if distilled == report.round else ()
            losses = (*(known for known in earlier if known[0] < report.step), (report.step, report.loss))
            distilled = report.round
        return MergeProgress(report.round, report.phase, report.step, report.steps, losses, distilled)

    def ended(self) -> MergeProgress:
        """The same, once the merge is over."""
        return replace(self, phase="")


class ProgressBoard:
    """Keeps the last progress of each device."""

    def __init__(self) -> None:
        self._latest: dict[str, DeviceProgress] = {}
        self._first_steps: dict[str, int] = {}

    def of(self, state: RoundState) -> dict[str, DeviceProgress]:
        """The progress of the clients that are online and work on the open attempt; from any thread."""
        latest, working = dict(self._latest), state.outstanding & state.online
        return {device: one for device, one in latest.items() if device in working and state.is_open(one.at)}

    def note(self, device: str, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat; one without a phase ends what was known."""
        if beat.phase is None:
            self.forget(device)
            return
        about = (beat.round, beat.attempt, beat.phase)
        before = self._latest.get(device)
        if before is None or (before.round, before.attempt, before.phase) != about or beat.step < before.step:
            self._first_steps[device], since = beat.step, now
        else:
            since = before.since
        done = beat.step - self._first_steps[device]
        left = max(0, beat.steps - beat.step)
        ends_at = now + left * (now - since) / done if done > 0 else None
        self._latest[device] = DeviceProgress(*about, beat.step, beat.steps, since, now, ends_at)

    def forget(self, device: str) -> None:
        """Drop what is known of a device: it delivered, declined or is gone."""
        self._latest.pop(device, None)
        self._first_steps.pop(device, None)


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
