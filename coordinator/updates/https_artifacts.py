"""What the HTTPS carrier has of the running service."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.storage.store import Store
from coordinator.updates.published_artifacts import Library
from coordinator.updates.receiver import Intake
from fedcg.event_log import EventLog


@dataclass(frozen=True)
class Shelf:
    """Where artifacts are taken from and put.

    Attributes:
        library: what devices may fetch.
        intake: takes updates.
        store: the database with the register.
        events: the event log.
    """

    library: Library
    intake: Intake
    store: Store
    events: EventLog
