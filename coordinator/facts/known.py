"""The sources of facts: database, specs, event log, and running services if there are any."""

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path

from coordinator.operations.operations import federation_of
from coordinator.rounds.engine import RoundState
from coordinator.rounds.records import DeviceRecord, DeviceState, FederationRecord, UpdateRecord
from coordinator.service.coordinator import Coordinator
from coordinator.service.service import Service
from coordinator.storage.store import Store
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value


class Known(Value):
    """The sources of facts at one moment. Devices and their last updates are read once.

    Attributes:
        store: the database.
        spec: returns the spec of a federation.
        home: the coordinator's directory.
        services: the running services by federation; empty if no coordinator is running.
        now: unix time.
    """

    store: Store
    spec: Callable[[FederationRecord], FederationSpec]
    home: Path
    services: Mapping[str, Service] = field(default_factory=dict)
    now: float = field(default_factory=time.time)

    @cached_property
    def devices(self) -> list[DeviceRecord]:
        """All devices ever enrolled, sorted by id."""
        return self.store.devices()

    @cached_property
    def members(self) -> list[DeviceRecord]:
        """The devices that may participate, sorted by id."""
        return [device for device in self.devices if device.state is DeviceState.ENROLLED]

    @cached_property
    def last_updates(self) -> Mapping[str, Mapping[str, UpdateRecord]]:
        """By federation and client, the last update with any outcome."""
        return {one.id: self.store.overview.last_deliveries(one.id) for one in self.store.federations()}

    def federation(self, federation: str) -> FederationRecord:
        """A federation of this coordinator.

        Raises:
            NotFoundError: no federation has this name; the message lists the existing ones.
        """
        return federation_of(self.store, federation)

    def state(self, federation: str) -> RoundState:
        """The state of a federation: from its running service, else as stored, with no device online."""
        service = self.services.get(federation)
        return self.store.round_state(federation) if service is None else service.state


def known_of(coordinator: Coordinator, home: Path) -> Known:
    """The sources of a running coordinator, now."""
    return Known(coordinator.store, coordinator.spec, home, coordinator.services)
