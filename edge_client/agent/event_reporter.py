"""The agent's reports to people: lines of the event log and of its log. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edge_client.session.events import Event, HelloRefused, Invited, Offered, Receipted, RoundCommitted, Welcomed
from edge_client.training.messages import Failed
from fedcg.disk_errors import advice_for
from fedcg.event_log import EventLog
from fedcg.refusal_counter import Refusals
from fedcg.wire.errors import IntegrityError, VersionError, WireError
from fedcg.wire.messages.messages import CohortVerdict
from fedcg.worker_process import Exited

UNANSWERED_HELLOS = 5  # with 2 s between them; a running coordinator answers the first or the second
_log = logging.getLogger(__name__)


def describe_end(outcome: Mapping[str, object], *, succeeded: bool) -> str:
    """How the federation ended for this device, in one line.

    Args:
        outcome: the record of the end in the private store.
        succeeded: whether a personal model could be chosen, and exported where that is asked for.
    """
    if not succeeded:
        return "finished, but no personal model could be chosen or exported"
    accuracy = outcome.get("accuracy_personal")
    model = f"model {Path(str(outcome['model_dir'])).name}" if outcome.get("model_dir") else "no exported model"
    return f"finished; {model}" + (f", accuracy {accuracy:.1%}" if isinstance(accuracy, float) else "")


class LinkProblems(logging.Handler):
    """Copies the transport's warnings to the event log, where `fedcg agent status` finds them; a repeated one once."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._last: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning, unless its reason is that of the one before."""
        reason = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
        if reason != self._last:
            self._last = reason
            self._events.write("link_problem", detail=record.getMessage())


class EventReporter:
    """Writes the event log and the log of one device.

    Args:
        device: its id.
        store: where its private store is.
        events: the event log.

    Attributes:
        refusals: counts what was refused since the start.
    """

    def __init__(self, device: str, store: Path, events: EventLog) -> None:
        self._device = device
        self._store = store
        self._events = events
        self.refusals = Refusals(events)
        self._cohort = CohortVerdict.ALONE
        self._links = 0
        self._hellos = 0

    def report(self, event: Event) -> None:
        """Record the next event of the state machine."""
        if isinstance(event, Welcomed | Invited):
            self._report_cohort(event.cohort)
        if isinstance(event, Welcomed | HelloRefused):
            self._hellos = 0
        if isinstance(event, Welcomed):
            self._events.write("welcomed", epoch=event.epoch, version=event.version)
            _log.info("%s: the coordinator answered", self._device)
        elif isinstance(event, HelloRefused):
            self.refuse("hello", VersionError(event.reason))
            _log.error("%s: %s", self._device, event.reason)
        elif isinstance(event, Offered):
            self._events.write("offer", round=event.offer.round, attempt=event.offer.attempt, live=event.live)
        elif isinstance(event, Invited):
            self._events.write("invited", round=event.round_attempt.round, attempt=event.round_attempt.attempt)
            _log.info("%s: invited to %s", self._device, event.round_attempt)
        elif isinstance(event, RoundCommitted):
            _log.info("%s: %s is trained", self._device, event.round_attempt)
        elif isinstance(event, Receipted):
            receipt = event.receipt
            _log.info("%s: the update is %s %s", self._device, receipt.outcome.value, receipt.reason)

    def link(self, *, up: bool) -> None:
        """The link to the broker changed."""
        self._events.write("link", up=up)
        self._hellos, self._links = 0, self._links + up
        if up:
            _log.info("%s: connected%s", self._device, " again" if self._links > 1 else "")
        else:
            _log.warning("%s: the link to the broker is lost", self._device)

    def hello(self) -> None:
        """Count a hello; after several without an answer, report it, because a person should look for the reason."""
        self._hellos += 1
        if self._hellos == UNANSWERED_HELLOS:
            detail = (
                "the broker is reached, but the coordinator does not answer: it does not run, this device was revoked, or it is "
                "missing in the broker's access list; `fedcg doctor` looks for the reason once the agent is stopped"
            )
            self._events.write("link_problem", detail=detail)
            _log.warning("%s: %s", self._device, detail)

    def failed(self, report: Failed) -> None:
        """A round is declined because it can't be trained here."""
        attempt, reason = report.round_attempt, report.reason.value
        self._events.write(
            "round_failed", round=attempt.round, attempt=attempt.attempt, reason=reason, detail=report.detail
        )
        _log.warning("%s declines %s (%s): %s", self._device, attempt, reason, report.detail)

    def died(self, report: Exited) -> None:
        """Report that the training process has ended."""
        self._events.write("trainer_died", pid=report.pid, exit_code=report.exit_code, reason=report.reason)
        cause = report.reason or "code -9 is mostly a lack of memory"
        _log.warning("%s: the training process ended with code %s (%s)", self._device, report.exit_code, cause)

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
        _log.error("%s: %s", self._device, detail)
        self._events.write("agent_error", detail=detail)

    def damage(self, problem: str) -> None:
        """Report that something in the private store is damaged."""
        self.refuse("store", IntegrityError(problem))
        _log.error("%s: %s", self._store, problem)

    def refuse(self, what: str, error: Exception) -> None:
        """Count something received or stored that is not used."""
        self.refusals.note(what, error)

    def _report_cohort(self, verdict: CohortVerdict) -> None:
        if verdict is CohortVerdict.DIFFERENT and self._cohort is not CohortVerdict.DIFFERENT:
            _log.warning(
                "%s: other devices have another cohort secret, so private networks start apart and merge badly; compare "
                "`fedcg cohort status` on all devices",
                self._device,
            )
        if verdict is not self._cohort:
            self._cohort = verdict
            self._events.write("cohort", others=verdict.value)
