"""What a running coordinator is given; it creates nothing outside of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.aggregation_messages import WorkerSettings
from coordinator.events import EventLog
from coordinator.records import FederationRecord
from coordinator.store import Store
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts import ArtifactStore
from fedcg.wire.signing import SigningKey
from fedcg.wire.transport import Transport, Will


@dataclass(frozen=True)
class Setup:
    """The surroundings of a service.

    Attributes:
        federation: the federation to serve.
        spec: its spec.
        store: the database.
        artifacts: directory of artifacts.
        connect: makes the transport, with the will it must leave.
        key: signs.
        worker: what the aggregation worker may use.
        events: the diary.
        clock: unix time.
    """

    federation: FederationRecord
    spec: FederationSpec
    store: Store
    artifacts: ArtifactStore
    connect: Callable[[Will], Transport]
    key: SigningKey
    worker: WorkerSettings
    events: EventLog
    clock: Callable[[], float] = time.time
