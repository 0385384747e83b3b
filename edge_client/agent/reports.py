"""The agent's reports: events for people, heartbeats and self-reports for the coordinator, and state for systemd. Makes no decisions.

Events are also logged as sentences. A self-report has codes of the doctor's findings, the clock, readings and the deployed model.
Source for systemd: sd_notify(3).
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import get_args

from devices.telemetry import Telemetry
from edge_client.config import PolicySection
from edge_client.errors import EdgeError
from edge_client.link.coordinator_link import CoordinatorLink
from edge_client.session.signals import HelloRefused, Input, Invited, Noted, Offered, RoundFailed, Welcomed
from edge_client.session.state import SessionState
from edge_client.store.checked_files import SentRecord
from export.errors import ExportError
from export.model.manifest import Manifest, read_manifest
from export.model.versions import ModelVersions
from fedcg.event_log import EventLog, EventValue, log_event
from fedcg.files import advice_for
from fedcg.values import Value
from fedcg.wire.errors import IntegrityError, Refusals, VersionError, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.parts import ReportField
from fedcg.worker_process import Exited, repeating

PHASES: tuple[schemas.TrainingPhase, ...] = get_args(schemas.TrainingPhase)
UNANSWERED_HELLOS = 5  # 2 s apart; a running coordinator answers the first or second


def describe_end(outcome: Mapping[str, object], *, succeeded: bool) -> str:
    """A one-line summary of how the federation ended for this device.

    Args:
        outcome: the record of the end in the private store.
        succeeded: whether a personal model was chosen and, if configured, exported.
    """
    if not succeeded:
        return "finished, but no personal model could be chosen or exported"
    accuracy = outcome.get("accuracy_onnx" if outcome.get("model_dir") else "accuracy_personal")  # of that model
    model = f"model {Path(str(outcome['model_dir'])).name}" if outcome.get("model_dir") else "no exported model"
    return f"finished; {model}" + (f", accuracy {accuracy:.1%}" if isinstance(accuracy, float) else "")


class LinkProblems(logging.Handler):
    """Copies the transport's warnings to the event log for `fedcg agent status`. Repetitions are dropped."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events.unwatched()  # the warnings are already in the log
        self._last: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning unless it repeats the previous reason."""
        reason = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
        if reason != self._last:
            self._last = reason
            self._events.write("link_problem", detail=record.getMessage())


class Progress(Value):
    """Progress of the training process in a phase of a round attempt."""

    at: schemas.RoundAttempt
    phase: schemas.TrainingPhase
    step: int = 0
    steps: int = 0


def _progress_of(event: Mapping[str, EventValue]) -> Progress:
    round_number, attempt, step, steps = (
        value if isinstance(value := event.get(name), int) else 0 for name in ("round", "attempt", "step", "steps")
    )
    phase: schemas.TrainingPhase = next((known for known in PHASES if known == event.get("phase")), "train")
    # In percent, because the number of steps reveals the number of images.
    return Progress(
        schemas.RoundAttempt(round_number, attempt), phase, 100 * step // steps if steps else 0, min(100, 100 * steps)
    )


class EventReporter:
    """Writes the event log of one device.

    Args:
        store: path of its private store.
        events: the event log.
        clock: monotonic seconds.

    Attributes:
        refusals: counts refused items since the start.
        rounds: number of rounds of the federation, from the last offer; 0 before it.
        progress: of the training process; None while it does not train.
    """

    def __init__(self, store: Path, events: EventLog, clock: Callable[[], float]) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self.refusals = Refusals(events)
        self.rounds = 0
        self.progress: Progress | None = None
        self._cohort = schemas.CohortVerdict.ALONE
        self._down_at: float | None = None
        self._hellos = 0
        self._invited: schemas.RoundAttempt | None = None

    def report(self, event: Input) -> None:
        """Record the next event of the state machine."""
        if isinstance(event, Welcomed | Invited) and event.cohort is not self._cohort:
            self._cohort = event.cohort
            self._events.write("cohort", others=event.cohort.value)
        if isinstance(event, Welcomed | HelloRefused):
            self._hellos = 0
        if isinstance(event, Welcomed):
            self._events.write("welcomed", epoch=event.epoch, version=event.version)
        elif isinstance(event, HelloRefused):
            self.refusals.note("hello", VersionError(event.reason))
        elif isinstance(event, Offered):
            self.rounds = event.offer.rounds
            self._events.write("offer", **self._at(event.offer.at), live=event.live)
        elif isinstance(event, Invited) and event.round_attempt != self._invited:  # reminders come every few seconds
            self._invited = event.round_attempt
            self._events.write("invited", **self._at(event.round_attempt))

    def _at(self, attempt: schemas.RoundAttempt) -> dict[str, int]:
        return {**vars(attempt), "rounds": self.rounds}

    def link(self, *, up: bool) -> None:
        """Record that the link to the broker changed."""
        now = self._clock()
        down_s = round(now - self._down_at, 1) if up and self._down_at is not None else None
        self._events.write("link", up=up, down_s=down_s)
        self._hellos, self._down_at = 0, None if up else now

    def hello(self, why: str = "") -> None:
        """Count a hello. After several unanswered ones, report the known or likely reasons."""
        self._hellos += 1
        if self._hellos == UNANSWERED_HELLOS:
            detail = why or (
                "the broker is reachable, but the coordinator does not answer: it is not running, this federation is not started, or this "
                "device is revoked or missing in the broker's access list; stop the agent and run `fedcg doctor` to find the reason"
            )
            self._events.write("link_problem", detail=detail)

    def failed(self, report: RoundFailed) -> None:
        """Record that a round is declined because it can't be trained here."""
        at = self._at(report.round_attempt)
        self._events.write("round_failed", **at, reason=report.reason.value, detail=report.detail)

    def noted(self, report: Noted) -> None:
        """Process an event that the training process has written."""
        event = dict(report.event)
        if event["event"] in ("phase_started", "progress"):
            self.progress = _progress_of(event)
        elif event["event"] == "paused" and self.progress is not None:
            self.progress = Progress(self.progress.at, "wait")
        if event["event"] in ("phase_started", "committed", "paused", "resumed"):
            event["rounds"] = self.rounds
        log_event(event)

    def died(self, report: Exited) -> None:
        """Report that the training process has ended."""
        self.progress = None
        self._events.write("trainer_died", pid=report.pid, exit_code=report.exit_code, reason=report.reason)

    @contextmanager
    def recording_errors(self, refused: str, failed: str = "a download") -> Iterator[None]:
        """Record an error raised in the context: a message or chunk is refused, or the disk failed."""
        try:
            yield
        except WireError as error:
            self.refusals.note(refused, error)
        except OSError as error:
            self.disk_failed(failed, error)

    def disk_failed(self, what: str, error: OSError) -> None:
        """Report that the disk failed during an action."""
        detail = f"{what}: {error}. {advice_for(error, self._store)}"
        self._events.write("agent_error", detail=detail)

    def damage(self, problem: str) -> None:
        """Report that something in the private store is damaged."""
        self.refusals.note("store", IntegrityError(problem))


REPORT_EVERY_S = 300.0
"""Time between two reports without changes, which let the coordinator compare clocks."""
EXAMINE_EVERY_S = 3600.0
Examine = Callable[[], tuple[schemas.DoctorFinding, ...]]
_log = logging.getLogger(__name__)


class SelfReporter:
    """Sends one agent process's regular reports in a session: heartbeats and self-reports.

    Args:
        policy: of the device's owner.
        models: folder of exported model versions.
        read: returns the latest sensor readings; None before the first.
        wall: the device's clock, in unix seconds.
        keepalive_s: between two heartbeats.

    Attributes:
        findings: of the last doctor run; None before it. Set from any thread.
        is_paused: whether the owner has paused this device.
    """

    def __init__(
        self,
        policy: PolicySection,
        models: Path,
        read: Callable[[], Telemetry | None] = lambda: None,
        wall: Callable[[], float] = time.time,
        keepalive_s: float = 30.0,
    ) -> None:
        self._has_health = ReportField.HEALTH in policy.allow_report
        self._has_model = ReportField.MODEL in policy.allow_report
        self._read = read if ReportField.TELEMETRY in policy.allow_report else lambda: None
        self._models = models
        self._wall = wall
        self._keepalive_s = keepalive_s
        self._beat_at = float("-inf")
        self._beat_phase: tuple[schemas.RoundAttempt, str] | None = None
        self._boot = secrets.token_hex(16)
        self._sent: schemas.DeviceCondition | None = None
        self._sent_at = float("-inf")
        self._model: schemas.ServedModel | None = None
        self.findings: tuple[schemas.DoctorFinding, ...] | None = None
        self.is_paused = False

    def repeat(self) -> None:
        """Send the report again, because a new session was opened."""
        self._sent = None

    def look_at_model(self) -> None:
        """Read which exported model is deployed."""
        self._model = served_model(self._models) if self._has_model else None

    def due(self, about: Mapping[str, object], now: float) -> schemas.SelfReport | None:
        """The report to send now, if one is due.

        Args:
            about: federation, sender and recipient.
            now: monotonic seconds.
        """
        is_late = now - self._sent_at >= REPORT_EVERY_S
        if is_late or self._sent is None:
            self.look_at_model()
        condition = schemas.DeviceCondition(
            findings=self.findings if self._has_health else None,
            model=self._model,
            paused=True if self._has_health and self.is_paused else None,
        )
        if condition == self._sent and not is_late:
            return None
        self._sent, self._sent_at = condition, now
        clock, read = self._wall() if self._has_health else None, self._read()
        own = {"boot": self._boot, "clock": clock, "telemetry": None if read is None else readings(read)}
        return schemas.SelfReport.model_validate({**about, **own, "condition": condition})

    def send_due(
        self, state: SessionState, link: CoordinatorLink, progress: Progress | None, sent: SentRecord, now: float
    ) -> None:
        """Send a heartbeat when due, training progress, and a due self-report.

        Heartbeats are needed because a will is lost if the broker fails together with this device.

        Args:
            state: of the session.
            link: to the coordinator.
            progress: of training, if known.
            sent: the record of everything sent.
            now: monotonic seconds.

        Raises:
            OSError: the record could not be written; the report is not sent.
        """
        if not link.handshake.is_open:
            return
        done = progress if self._has_health else None
        phase = None if done is None else (done.at, done.phase)
        every_s = self._keepalive_s if done is None else min(PROGRESS_S, self._keepalive_s)
        if now - self._beat_at >= every_s or phase != self._beat_phase:
            self._beat_at, self._beat_phase = now, phase
            about = state.addressed() if done is None else state.addressed(done.at)
            if done is not None:
                about |= {"phase": done.phase, "step": done.step, "steps": done.steps}
            link.send(schemas.Heartbeat(**about))
        if (report := self.due(state.addressed(), now)) is not None:
            read = None if report.telemetry is None else sorted(report.telemetry.model_dump(exclude_none=True))
            sent.self_report({**report.condition.model_dump(mode="json"), "telemetry": read})
            link.send(report)

    def examining(self, examine: Examine) -> AbstractContextManager[None]:
        """Run the doctor's checks periodically on a separate thread. A folder of images takes seconds."""

        def work() -> float:
            try:
                self.findings = examine()
            except (EdgeError, OSError) as error:
                _log.warning("the doctor's checks failed: %s; run `fedcg doctor` for details", error)
            return EXAMINE_EVERY_S

        return repeating("doctor", work) if self._has_health else nullcontext()


def readings(read: Telemetry) -> schemas.Readings:
    """The readings in the form that may leave the device: rounded numbers and codes, without sensor names."""
    zone = min(read.zones, key=lambda zone: zone.limit_c - zone.temperature_c, default=None)
    percent = read.supply.battery_percent
    causes = {"software": read.causes.software, "hardware": read.hardware_throttling}
    return schemas.Readings(
        temperature_c=None if zone is None else round(zone.temperature_c, 1),
        limit_c=None if zone is None else zone.limit_c,
        watts=None if read.drawn is None else round(read.drawn.watts, 1),
        battery=None if percent is None else percent / 100,
        on_mains=read.supply.on_mains,
        slowed_by=tuple(by for by, found in causes.items() if found),
        free_memory=read.free_memory_bytes,
        free_disk=read.free_disk_bytes,
    )


def served_model(root: Path) -> schemas.ServedModel | None:
    """The deployed model under a root of versions, with the evidence in its manifest; None if there is no model."""
    try:
        models = ModelVersions(root)
        directory, pointer = models.current(), models.pointer()
        manifest = read_manifest(directory)
    except (ExportError, OSError):
        return None
    returned, because = (pointer and pointer.returned) or (None, None)
    return schemas.ServedModel(
        version=directory.name,
        round=manifest.round,
        serves=manifest.serves,
        accuracy=manifest.verification.accuracy_onnx,
        before=None if manifest.gate is None else manifest.gate.before,
        forms=tuple(_evidence(manifest)),
        answers=pointer and pointer.answers,
        returned=returned,
        because=because,
    )


def _evidence(manifest: Manifest) -> Iterator[schemas.FormEvidence]:
    for one in manifest.variants:
        yield schemas.FormEvidence(
            name=one.name,
            size=None if one.file is None else one.file.size,
            latency_ms=one.latency_ms,
            accuracy=one.accuracy,
            agreement=one.top1_agreement,
            images=one.images,
        )
    if not manifest.variants:
        images = manifest.verification.images
        yield schemas.FormEvidence(
            name="fp32", size=manifest.model.size, accuracy=manifest.verification.accuracy_onnx, images=images
        )


PROGRESS_S = 5.0


class ServiceManager:
    """Notifies the service manager that started this process.

    Args:
        environment: of this process.
        clock: monotonic seconds.
    """

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._clock = clock
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = int(limit_us) / 1e6 / 3 if watched and limit_us.isdecimal() else None
        self._alive_at = float("-inf")
        self._status = ""

    def ready(self) -> None:
        """Report that the agent has started."""
        self._send("READY=1")

    def alive(self, status: str) -> None:
        """Notify the watchdog three times within its limit, and send the status when it changes."""
        now, lines = self._clock(), []
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}".replace("\n", " "))
        if self._every_s is not None and now - self._alive_at >= self._every_s:
            self._alive_at = now
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))

    def stopping(self) -> None:
        """Report that the agent is stopping."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.settimeout(1.0)
            with contextlib.suppress(OSError):  # failing to notify has no consequences
                manager.sendto(state.encode(), self._address)
