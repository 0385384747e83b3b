"""Reports of devices and the worker: progress of training and merge, and each device's condition.

Everything is in memory, except each device's last condition, which is in the database.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from coordinator.aggregation.jobs import Progressed
from coordinator.rounds.engine import RoundState
from coordinator.storage.store import Store
from fedcg.values import Value
from fedcg.wire.messages.schemas import Heartbeat, OfAttempt, Readings, SelfReport

BOOTS_KEPT = 8  # agent processes of a device that are distinguished


class DeviceProgress(OfAttempt):
    """A device's progress from its last heartbeat; times are unix seconds.

    Attributes:
        phase: phase of its training process.
        step, steps: progress of the phase.
        since: when the phase was first reported.
        ends_at: predicted end of the phase at the current rate; None before its second report.
    """

    phase: str
    step: int
    steps: int
    since: float
    ends_at: float | None


class MergeProgress(Value):
    """The worker's progress with a round, and the course of its last distillation.

    Attributes:
        phase: teacher or distil; empty once the merge is over.
        step, steps: progress of the phase.
        losses: (step, mean loss of the last steps) of a distillation, in order; empty without distillation.
        distilled: round of that distillation.
    """

    round: int
    phase: str
    step: int
    steps: int
    losses: tuple[tuple[int, float], ...] = ()
    distilled: int = 0

    @staticmethod
    def after(before: MergeProgress | None, report: Progressed) -> MergeProgress:
        """The progress after a report of the worker."""
        losses, distilled = (before.losses, before.distilled) if before is not None else ((), 0)
        if report.loss is not None:
            earlier = losses if distilled == report.round else ()
            losses = (*(known for known in earlier if known[0] < report.step), (report.step, report.loss))
            distilled = report.round
        return MergeProgress(report.round, report.phase, report.step, report.steps, losses, distilled)

    def ended(self) -> MergeProgress:
        """The progress once the merge is over."""
        return replace(self, phase="")


class ProgressBoard:
    """Keeps the last progress of each device."""

    def __init__(self) -> None:
        self._latest: dict[str, DeviceProgress] = {}
        self._first_steps: dict[str, int] = {}

    def of(self, state: RoundState) -> dict[str, DeviceProgress]:
        """The progress of online clients working on the open attempt; thread-safe."""
        latest, working = dict(self._latest), state.outstanding & state.online
        return {device: one for device, one in latest.items() if device in working and state.is_open(one.at)}

    def note(self, device: str, beat: Heartbeat, now: float) -> bool:
        """Handle a heartbeat; one without a phase clears the progress.

        Returns:
            Whether it is the first report about this attempt, or may be.
        """
        if beat.phase is None:
            self.forget(device)
            return False
        about = (beat.round, beat.attempt, beat.phase)
        before = self._latest.get(device)
        if before is None or (before.round, before.attempt, before.phase) != about or beat.step < before.step:
            self._first_steps[device], since = beat.step, now
        else:
            since = before.since
        done = beat.step - self._first_steps[device]
        left = max(0, beat.steps - beat.step)
        ends_at = now + left * (now - since) / done if done > 0 else None
        self._latest[device] = DeviceProgress(*about, beat.step, beat.steps, since, ends_at)
        return before is None or before.at != beat.at

    def forget(self, device: str) -> None:
        """Drop the progress of a device that delivered, declined or left."""
        self._latest.pop(device, None)
        self._first_steps.pop(device, None)


class ConditionBoard:
    """Keeps the last self-report of each device of one federation; times are unix seconds.

    Attributes:
        clock_ahead_s: by device, seconds by which its clock is ahead of the coordinator's; negative if behind.
        readings: by device, its sensor readings and when they arrived; not in the database, since each session sends new ones.
        remembered: by device, from its last hello: the highest epoch, the last trained round, and whether this coordinator has its accepted key.
        doubled_at: by device, when one of its agent processes reported again after another one, so that both are running.
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
        """Handle a self-report.

        Args:
            device: the sender.
            report: its message.
            now: unix time.
            is_delayed: whether it may have waited behind chunks of an update; then its clock is not compared.
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
