"""Hardware monitoring for the agent: whether the device may train now, and its latest readings."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime

from devices.eligibility import Reason, no_time, obstacles
from devices.telemetry import Sensors, Telemetry
from edge_client.config import AgentConfig
from edge_client.session.signals import Invited
from edge_client.store.checked_files import LEDGER_FILE, read_lines
from fedcg.event_log import EventValue
from fedcg.wire.messages.schemas import DeclineReason, Offer
from fedcg.wire.parts import ReportField
from fedcg.worker_process import repeating

LOOK_EVERY_S = 15.0


class HardwareWatch:
    """Monitors the hardware that one agent runs on.

    Args:
        config: of the device.
        read: reads the sensors.
        now: local time.

    Attributes:
        last_read: the latest readings; None before the first.
    """

    def __init__(
        self,
        config: AgentConfig,
        read: Callable[[], Telemetry] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._config = config
        self._read = read or Sensors(config.store).read
        self._now = now
        self._lock = threading.Lock()
        self._last: Reason | None = None
        self.last_read: Telemetry | None = None
        self._round_s = self._last_round_s()
        self._paused_s = 0.0
        self._ahead_s: float | None = None  # the coordinator's clock minus the monotonic one

    def _last_round_s(self) -> float | None:
        """How long all steps took in the last round of this federation in the ledger."""
        found = None
        for line in read_lines(self._config.store / LEDGER_FILE):
            seconds, share = line.get("seconds"), line.get("share", 1.0)
            is_mine = line.get("federation") == self._config.federation
            if is_mine and isinstance(seconds, int | float) and isinstance(share, float) and share > 0.0:
                found = seconds / share
        return found

    def welcomed(self, server_time: float | None, now: float) -> None:
        """Store the offset of the coordinator's clock, which its deadlines refer to. `now` is monotonic."""
        self._ahead_s = None if server_time is None else server_time - now

    def predicted_s(self, share: float) -> float | None:
        """The predicted time for a share of a round's steps, for the coordinator; None if unknown or if the policy keeps it here."""
        if self._round_s is None or not self._is_told:
            return None
        return round(self._round_s * share, 1)

    @property
    def _is_told(self) -> bool:
        return ReportField.HEALTH in self._config.policy.allow_report

    def decline(self, invited: Invited, offer: Offer | None, now: float) -> tuple[DeclineReason, str] | None:
        """Why an invitation is declined, or None: a code that leaves the device, and a sentence for its owner.

        If the owner does not allow the report field `health`, the code is `not_eligible`.
        """
        left_s = None
        if offer is not None and offer.at == invited.round_attempt and self._ahead_s is not None:
            left_s = offer.deadline_at - (now + self._ahead_s)
        found = self.reason(left_s, invited.share)
        if found is None:
            return None
        return found.obstacle if self._is_told else DeclineReason.NOT_ELIGIBLE, found.detail

    def reason(self, left_s: float | None = None, share: float = 1.0) -> Reason | None:
        """Why the device may not train now, or None.

        Args:
            left_s: seconds until the deadline of the round; None if unknown.
            share: requested share of the spec's local steps.
        """
        round_s = None if self._round_s is None else self._round_s * share
        return self._look() or (None if left_s is None else no_time(left_s, round_s))

    def _look(self) -> Reason | None:
        with self._lock:
            self.last_read = read = self._read()
            before = None if self._last is None else self._last.obstacle
            settings = self._config.eligibility
            self._last = next(iter(obstacles(read, settings, self._now(), before=before)), None)
            return self._last

    def noted(self, event: Mapping[str, EventValue]) -> None:
        """Update the duration of a round's steps from an event of the training process. Pauses don't count."""
        seconds, share = event.get("seconds"), event.get("share")
        if event["event"] == "phase_started" and event.get("phase") == "load":
            self._paused_s = 0.0
        elif event["event"] == "resumed" and isinstance(seconds, int | float):
            self._paused_s += seconds
        elif event["event"] == "committed" and isinstance(seconds, int | float):
            self._round_s = max(0.0, seconds - self._paused_s) / (share if isinstance(share, float) else 1.0)

    def watching(self) -> AbstractContextManager[None]:
        """Read the sensors periodically on a separate thread."""
        return repeating("hardware", self._look_again)

    def _look_again(self) -> float:
        self._look()
        return LOOK_EVERY_S
