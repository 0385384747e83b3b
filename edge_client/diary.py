"""What the agent tells people of what it sees: lines of the event log and warnings. Decides nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from edge_client.session_events import Event, Invited, Offered, TurnedAway, Welcomed
from fedcg.event_log import EventLog
from fedcg.refusals import Refusals
from fedcg.wire.errors import IntegrityError, VersionError
from fedcg.wire.messages import CohortVerdict

_log = logging.getLogger(__name__)


class Diary:
    """Writes for one device.

    Args:
        device: its id.
        store: where its private store is.
        events: the event log.

    Attributes:
        refusals: what was refused since the start.
    """

    def __init__(self, device: str, store: Path, events: EventLog) -> None:
        self._device = device
        self._store = store
        self._events = events
        self.refusals = Refusals(events)
        self._cohort = CohortVerdict.ALONE

    def tell(self, event: Event) -> None:
        """Write down what the state machine is about to hear."""
        if isinstance(event, Welcomed | Invited):
            self._tell_cohort(event.cohort)
        if isinstance(event, Welcomed):
            self._events.write("welcomed", epoch=event.epoch, version=event.version)
        elif isinstance(event, TurnedAway):
            self.refuse("hello", VersionError(event.reason))
            _log.error("%s: %s", self._device, event.reason)
        elif isinstance(event, Offered):
            self._events.write("offer", round=event.offer.round, attempt=event.offer.attempt, live=event.live)
        elif isinstance(event, Invited):
            self._events.write("invited", round=event.cursor.round, attempt=event.cursor.attempt)

    def link(self, *, up: bool) -> None:
        """The link to the broker changed."""
        self._events.write("link", up=up)

    def stumble(self, what: str, error: OSError) -> None:
        """The disk failed at something."""
        _log.error("%s: %s failed: %s. Free space on, or repair, %s", self._device, what, error, self._store)
        self._events.write("agent_error", detail=f"{what}: {error}")

    def damage(self, problem: str) -> None:
        """Something in the private store is not what it was."""
        self.refuse("store", IntegrityError(problem))
        _log.error("%s: %s", self._store, problem)

    def refuse(self, what: str, error: Exception) -> None:
        """Something that came, or lay here, is not used."""
        self.refusals.note(what, error)

    def _tell_cohort(self, verdict: CohortVerdict) -> None:
        if verdict is CohortVerdict.DIFFERENT and self._cohort is not CohortVerdict.DIFFERENT:
            _log.warning(
                "%s: other devices have another cohort secret, so private networks start apart and merge badly; compare "
                "`fedcg cohort status` on all devices",
                self._device,
            )
        if verdict is not self._cohort:
            self._cohort = verdict
            self._events.write("cohort", others=verdict.value)
