"""Heartbeats of a device, the progress of its training in them, and its reports about itself, when they are due."""

from __future__ import annotations

from edge_client.agent.event_reporter import EventReporter
from edge_client.agent.self_report import SelfReporter
from edge_client.config import AgentConfig
from edge_client.messaging.coordinator_link import CoordinatorLink
from edge_client.session.state import SessionState
from edge_client.store.sent_record import SentRecord
from fedcg.wire.messages.messages import Heartbeat, RoundAttempt
from fedcg.wire.parts import ReportField

PROGRESS_S = 5.0


class Heartbeats:
    """Sends what a session is to hear regularly.

    Args:
        config: of the device.
        link: to the coordinator.
        reporter: knows how far training is.
        self_reporter: makes the reports of the device about itself.
        sent: the record of what leaves.
    """

    def __init__(
        self,
        config: AgentConfig,
        link: CoordinatorLink,
        reporter: EventReporter,
        self_reporter: SelfReporter,
        sent: SentRecord,
    ) -> None:
        self._keepalive_s = config.broker.keepalive_s
        self._has_health = ReportField.HEALTH in config.policy.allow_report
        self._link = link
        self._reporter = reporter
        self._self_reporter = self_reporter
        self._sent = sent
        self._beat_at = float("-inf")
        self._beat_phase: tuple[RoundAttempt, str] | None = None

    def send_due(self, state: SessionState, now: float) -> None:
        """Send a heartbeat at its interval, since a will is lost when a broker dies with this device; the progress of training; a due self-report.

        Raises:
            OSError: the record of what leaves could not be written; the report stays here.
        """
        if not self._link.has_session:
            return
        done = self._reporter.progress if self._has_health else None
        phase = None if done is None else (done.at, done.phase)
        every_s = self._keepalive_s if done is None else min(PROGRESS_S, self._keepalive_s)
        if now - self._beat_at >= every_s or phase != self._beat_phase:
            self._beat_at, self._beat_phase = now, phase
            about = state.addressed() if done is None else state.addressed(done.at)
            if done is not None:
                about |= {"phase": done.phase, "step": done.step, "steps": done.steps}
            self._link.send(Heartbeat(**about))
        if (report := self._self_reporter.due(state.addressed(), now)) is not None:
            read = None if report.telemetry is None else sorted(report.telemetry.model_dump(exclude_none=True))
            self._sent.self_report({**report.condition.model_dump(mode="json"), "telemetry": read})
            self._link.send(report)
