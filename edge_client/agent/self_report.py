"""What the agent sends without being asked: heartbeats with the progress of training, and reports about the device itself.

A report has codes of the doctor's findings, the clock, readings, and the exported model in use.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from devices.telemetry import Telemetry
from edge_client.agent.event_reporter import EventReporter
from edge_client.config import AgentConfig, PolicySection
from edge_client.errors import EdgeError
from edge_client.messaging.coordinator_link import CoordinatorLink
from edge_client.session.state import SessionState
from edge_client.store.sent_record import SentRecord
from export.errors import ExportError
from export.model.manifest import Manifest, read_manifest
from export.model.versions import Slots
from fedcg.wire.messages.schemas import (
    DeviceCondition,
    DoctorFinding,
    FormEvidence,
    Heartbeat,
    Readings,
    RoundAttempt,
    SelfReport,
    ServedModel,
)
from fedcg.wire.parts import ReportField
from fedcg.worker_process import repeating

EVERY_S = 300.0
"""Time between two reports of the same: the coordinator compares the clocks."""
EXAMINE_EVERY_S = 3600.0
Examine = Callable[[], tuple[DoctorFinding, ...]]
_log = logging.getLogger(__name__)


class SelfReporter:
    """Makes the reports of one agent process.

    Args:
        policy: what the device's owner allows.
        models: folder of the versions of the exported model.
        read: the last readings of the sensors; None before the first.
        wall: the device's clock, in unix seconds.

    Attributes:
        findings: of the last examination; None before it. Set from any thread.
        is_paused: whether the owner has paused this device.
    """

    def __init__(
        self,
        policy: PolicySection,
        models: Path,
        read: Callable[[], Telemetry | None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._has_health = ReportField.HEALTH in policy.allow_report
        self._has_model = ReportField.MODEL in policy.allow_report
        self._read = read if ReportField.TELEMETRY in policy.allow_report else lambda: None
        self._models = models
        self._wall = wall
        self._boot = secrets.token_hex(16)
        self._sent: DeviceCondition | None = None
        self._sent_at = float("-inf")
        self._model: ServedModel | None = None
        self.findings: tuple[DoctorFinding, ...] | None = None
        self.is_paused = False

    def repeat(self) -> None:
        """Report again: a session was opened."""
        self._sent = None

    def look_at_model(self) -> None:
        """Read which exported model is in use."""
        self._model = served_model(self._models) if self._has_model else None

    def due(self, about: Mapping[str, object], now: float) -> SelfReport | None:
        """The report to send now, if one is due.

        Args:
            about: federation, sender and recipient.
            now: monotonic seconds.
        """
        is_late = now - self._sent_at >= EVERY_S
        if is_late or self._sent is None:
            self.look_at_model()
        condition = DeviceCondition(
            findings=self.findings if self._has_health else None,
            model=self._model,
            paused=True if self._has_health and self.is_paused else None,
        )
        if condition == self._sent and not is_late:
            return None
        self._sent, self._sent_at = condition, now
        clock, read = self._wall() if self._has_health else None, self._read()
        own = {"boot": self._boot, "clock": clock, "telemetry": None if read is None else readings(read)}
        return SelfReport.model_validate({**about, **own, "condition": condition})

    def examining(self, examine: Examine) -> AbstractContextManager[None]:
        """Examine the device now and then, on a thread of its own: a folder of images takes seconds."""

        def work() -> float:
            try:
                self.findings = examine()
            except (EdgeError, OSError) as error:
                _log.warning("this device could not be examined: %s; `fedcg doctor` shows why", error)
            return EXAMINE_EVERY_S

        return repeating("doctor", work) if self._has_health else nullcontext()


def readings(read: Telemetry) -> Readings:
    """The readings in the form in which they may leave: rounded numbers and codes, no name of a sensor."""
    zone = min(read.zones, key=lambda zone: zone.limit_c - zone.temperature_c, default=None)
    percent = read.supply.battery_percent
    causes = {"software": read.causes.software, "hardware": read.hardware_throttling}
    return Readings(
        temperature_c=None if zone is None else round(zone.temperature_c, 1),
        limit_c=None if zone is None else zone.limit_c,
        watts=None if read.drawn is None else round(read.drawn.watts, 1),
        battery=None if percent is None else percent / 100,
        on_mains=read.supply.on_mains,
        slowed_by=tuple(by for by, found in causes.items() if found),
        free_memory=read.free_memory_bytes,
        free_disk=read.free_disk_bytes,
    )


def served_model(root: Path) -> ServedModel | None:
    """The exported model in use under a root of versions, with the evidence in its manifest; None where there is none."""
    try:
        directory = Slots(root).current()
        manifest = read_manifest(directory)
    except (ExportError, OSError):
        return None
    return ServedModel(
        version=directory.name,
        round=manifest.round,
        serves=manifest.serves,
        accuracy=manifest.verification.accuracy_onnx,
        before=None if manifest.gate is None else manifest.gate.before,
        forms=tuple(_evidence(manifest)),
    )


def _evidence(manifest: Manifest) -> Iterator[FormEvidence]:
    for one in manifest.variants:
        yield FormEvidence(
            name=one.name,
            size=None if one.file is None else one.file.size,
            latency_ms=one.latency_ms,
            accuracy=one.accuracy,
            agreement=one.top1_agreement,
            images=one.images,
        )
    if not manifest.variants:
        images = manifest.verification.images
        yield FormEvidence(
            name="fp32", size=manifest.model.size, accuracy=manifest.verification.accuracy_onnx, images=images
        )


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
