"""Where facts come from: the database, the specs, the event log, and the running services where there are any."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.operations.operations import federation_of
from coordinator.rounds.engine import RoundState
from coordinator.rounds.records import FederationRecord
from coordinator.service.coordinator import Coordinator
from coordinator.service.service import Service
from coordinator.storage.store import Store
from fedcg.learning.spec import FederationSpec


@dataclass(frozen=True)
class Known:
    """What facts are made of, at one moment.

    Attributes:
        store: the database.
        spec: gives the spec of a federation.
        home: the coordinator's directory.
        services: the running services by federation; empty where no coordinator runs.
        now: unix time.
    """

    store: Store
    spec: Callable[[FederationRecord], FederationSpec]
    home: Path
    services: Mapping[str, Service] = field(default_factory=dict)
    now: float = field(default_factory=time.time)

    def federation(self, federation: str) -> FederationRecord:
        """A federation of this coordinator.

        Raises:
            NotFoundError: there is none of that name; names those that there are.
        """
        return federation_of(self.store, federation)

    def state(self, federation: str) -> RoundState:
        """Where a federation stands: of its running service, else as stored, where nobody is online."""
        service = self.services.get(federation)
        return self.store.round_state(federation) if service is None else service.state


def known_of(coordinator: Coordinator, home: Path) -> Known:
    """What a running coordinator knows now."""
    return Known(coordinator.store, coordinator.spec, home, coordinator.services)
