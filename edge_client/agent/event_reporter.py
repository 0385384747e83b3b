"""The agent's reports to people: events, whose sentences are in its log too. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from edge_client.session.events import Event, HelloRefused, Invited, Noted, Offered, RoundFailed, Welcomed
from fedcg.event_log import EventLog, EventValue, log_event
from fedcg.files import advice_for
from fedcg.wire.errors import IntegrityError, Refusals, VersionError, WireError
from fedcg.wire.messages.schemas import CohortVerdict, RoundAttempt, TrainingPhase
from fedcg.worker_process import Exited

PHASES: tuple[TrainingPhase, ...] = get_args(TrainingPhase)
UNANSWERED_HELLOS = 5  # with 2 s between them; a running coordinator answers the first or the second


def describe_end(outcome: Mapping[str, object], *, succeeded: bool) -> str:
    """How the federation ended for this device, in one line.

    Args:
        outcome: the record of the end in the private store.
        succeeded: whether a personal model could be chosen, and exported where that is asked for.
    """
    if not succeeded:
        return "finished, but no personal model could be chosen or exported"
    accuracy = outcome.get("accuracy_onnx" if outcome.get("model_dir") else "accuracy_personal")  # of what is named
    model = f"model {Path(str(outcome['model_dir'])).name}" if outcome.get("model_dir") else "no exported model"
    return f"finished; {model}" + (f", accuracy {accuracy:.1%}" if isinstance(accuracy, float) else "")


class LinkProblems(logging.Handler):
    """Copies the transport's warnings to the event log, where `fedcg agent status` finds them; a repeated one once."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events.unwatched()  # the log has the warnings already
        self._last: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning, unless its reason is that of the one before."""
        reason = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
        if reason != self._last:
            self._last = reason
            self._events.write("link_problem", detail=record.getMessage())


@dataclass(frozen=True)
class Progress:
    """How far the training process is: in a phase of a round attempt."""

    at: RoundAttempt
    phase: TrainingPhase
    step: int = 0
    steps: int = 0


def _progress_of(event: Mapping[str, EventValue]) -> Progress:
    round_number, attempt, step, steps = (
        value if isinstance(value := event.get(name), int) else 0 for name in ("round", "attempt", "step", "steps")
    )
    phase: TrainingPhase = next((known for known in PHASES if known == event.get("phase")), "train")
    return Progress(RoundAttempt(round_number, attempt), phase, step, steps)


class EventReporter:
    """Writes the event log of one device.

    Args:
        store: where its private store is.
        events: the event log.
        clock: monotonic seconds.

    Attributes:
        refusals: counts what was refused since the start.
        rounds: number of rounds of the federation, by the last offer; 0 before it.
        progress: how far the training process is; None when it does not train.
    """

    def __init__(self, store: Path, events: EventLog, clock: Callable[[], float]) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self.refusals = Refusals(events)
        self.rounds = 0
        self.progress: Progress | None = None
        self._cohort = CohortVerdict.ALONE
        self._down_at: float | None = None
        self._hellos = 0
        self._invited: RoundAttempt | None = None

    def report(self, event: Event) -> None:
        """Record the next event of the state machine."""
        if isinstance(event, Welcomed | Invited):
            self._report_cohort(event.cohort)
        if isinstance(event, Welcomed | HelloRefused):
            self._hellos = 0
        if isinstance(event, Welcomed):
            self._events.write("welcomed", epoch=event.epoch, version=event.version)
        elif isinstance(event, HelloRefused):
            self.refuse("hello", VersionError(event.reason))
        elif isinstance(event, Offered):
            self.rounds = event.offer.rounds
            self._events.write("offer", **self._at(event.offer.at), live=event.live)
        elif isinstance(event, Invited) and event.round_attempt != self._invited:  # reminders come every few seconds
            self._invited = event.round_attempt
            self._events.write("invited", **self._at(event.round_attempt))

    def _at(self, attempt: RoundAttempt) -> dict[str, int]:
        return {"round": attempt.round, "attempt": attempt.attempt, "rounds": self.rounds}

    def link(self, *, up: bool) -> None:
        """The link to the broker changed."""
        now = self._clock()
        down_s = round(now - self._down_at, 1) if up and self._down_at is not None else None
        self._events.write("link", up=up, down_s=down_s)
        self._hellos, self._down_at = 0, None if up else now

    def hello(self) -> None:
        """Count a hello; after several without an answer, report it, because a person should look for the reason."""
        self._hellos += 1
        if self._hellos == UNANSWERED_HELLOS:
            detail = (
                "the broker is reached, but the coordinator does not answer: it does not run, this federation is not started, or this "
                "device was revoked or is missing in the broker's access list; `fedcg doctor` looks for the reason once the agent is stopped"
            )
            self._events.write("link_problem", detail=detail)

    def failed(self, report: RoundFailed) -> None:
        """A round is declined because it can't be trained here."""
        at = self._at(report.round_attempt)
        self._events.write("round_failed", **at, reason=report.reason.value, detail=report.detail)

    def noted(self, report: Noted) -> None:
        """Take over an event that the training process has written."""
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
        """Record an error that ends the context: a message or chunk is refused, or the disk failed."""
        try:
            yield
        except WireError as error:
            self.refuse(refused, error)
        except OSError as error:
            self.disk_failed(failed, error)

    def disk_failed(self, what: str, error: OSError) -> None:
        """Report that the disk failed during an action."""
        detail = f"{what}: {error}. {advice_for(error, self._store)}"
        self._events.write("agent_error", detail=detail)

    def damage(self, problem: str) -> None:
        """Report that something in the private store is damaged."""
        self.refuse("store", IntegrityError(problem))

    def refuse(self, what: str, error: Exception) -> None:
        """Count something received or stored that is not used."""
        self.refusals.note(what, error)

    def _report_cohort(self, verdict: CohortVerdict) -> None:
        if verdict is not self._cohort:
            self._cohort = verdict
            self._events.write("cohort", others=verdict.value)
