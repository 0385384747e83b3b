"""The complete dependencies of a running coordinator."""

import time
from collections.abc import Callable, Collection
from dataclasses import field

from coordinator.aggregation.jobs import Reply, WorkerSettings
from coordinator.aggregation.worker_handle import AggregationWorker
from coordinator.config import KEEP_ROUNDS, RobustnessSettings, RoundSettings
from coordinator.pki.signing_keys import SigningIdentity
from coordinator.rounds.records import FederationRecord
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.transfer.windows import DEFAULT_PRESET, PRESETS, LinkLimits
from fedcg.wire.transport.transport import Transport, Will
from fedcg.worker_process import Exited

MakeWorker = Callable[[WorkerSettings, Callable[[Reply | Exited], None]], AggregationWorker]


class ServiceContext(Value):
    """The dependencies of a service.

    Attributes:
        federation: the federation to serve.
        spec: its spec.
        store: the database.
        artifacts: the artifact store.
        connect: creates the transport with the given will.
        signing_identity: returns the current signing identity; called repeatedly while the service runs.
        worker: settings of the aggregation worker.
        events: the event log.
        limits: limits of the link to the broker.
        clock: unix time.
        make_worker: creates the worker that merges updates.
        keep_rounds: number of closed rounds whose updates and aggregates stay on disk.
        robustness: limits of one device's influence on a merge.
        publish_access: makes the broker apply the access list without the named devices; returns whether a running broker did. Blocks.
        are_lists_pending: whether an earlier try, also one by a command, failed a while ago.
        rounds: settings of how long rounds wait before they open.
    """

    federation: FederationRecord
    spec: FederationSpec
    store: Store
    artifacts: ArtifactStore
    connect: Callable[[Will], Transport]
    signing_identity: Callable[[], SigningIdentity]
    worker: WorkerSettings
    events: EventLog
    limits: LinkLimits = PRESETS[DEFAULT_PRESET]
    clock: Callable[[], float] = time.time
    make_worker: MakeWorker = AggregationWorker
    keep_rounds: int = KEEP_ROUNDS
    robustness: RobustnessSettings = field(default_factory=RobustnessSettings)
    publish_access: Callable[[Collection[str]], bool] = lambda silenced: True
    are_lists_pending: Callable[[], bool] = lambda: False
    rounds: RoundSettings = field(default_factory=RoundSettings)
