"""Runs all federations of one coordinator: a service for each, on a separate thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from coordinator.rounds.engine import Phase
from coordinator.rounds.records import FederationRecord, FederationStatus
from coordinator.service.service import Service
from coordinator.service.service_context import ServiceContext
from coordinator.storage.store import Store
from coordinator.updates.published_artifacts import PublishedArtifacts
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.artifact_store import ArtifactStore

ContextOf = Callable[[FederationRecord], ServiceContext]
"""Returns the dependencies of a federation's service."""


class _Running(Value):
    service: Service
    thread: ThreadPoolExecutor
    work: Future[None]


class Coordinator:
    """Runs a service for every started federation.

    Args:
        store: the database.
        artifacts: the store of specs, updates and aggregates.
        events: the event log.
        context_of: returns the dependencies of a federation's service.
    """

    def __init__(self, store: Store, artifacts: ArtifactStore, events: EventLog, context_of: ContextOf) -> None:
        self.store = store
        self.artifacts = artifacts
        self._specs: dict[str, FederationSpec] = {}
        self.events = events
        self._context_of = context_of
        self._on_failure: Callable[[BaseException], None] | None = None  # until it is started
        self._running: dict[str, _Running] = {}
        self._changing = threading.Lock()

    @property
    def services(self) -> dict[str, Service]:
        """The running services, by federation."""
        return {federation: running.service for federation, running in list(self._running.items())}

    @property
    def is_finished(self) -> bool:
        """Whether every started federation is over and its devices have left, or a minute has passed since."""
        services = self.services.values()
        return bool(services) and all(service.finished_and_left.is_set() for service in services)

    def spec(self, record: FederationRecord) -> FederationSpec:
        """The spec of a federation."""
        if record.id not in self._specs:
            self._specs[record.id] = FederationSpec.parse(self.artifacts.get(record.spec))
        return self._specs[record.id]

    def published(self, artifact: str) -> PublishedArtifacts | None:
        """The artifacts of the federation whose devices may fetch this one; None if there is none."""
        services = self.services.values()
        return next((service.published for service in services if service.published.allows(artifact)), None)

    def start(self, on_failure: Callable[[BaseException], None]) -> None:
        """Start the service of every started federation. Blocks until each has rebuilt its state.

        Args:
            on_failure: called with the error of a failed service, on its thread; the process must then exit.
        """
        self._on_failure = on_failure
        for record in self.store.federations():
            self.follow(record.id)

    def follow(self, federation: str, *, resume: bool = False) -> None:
        """Start a federation's service, or pass it the changes in the database. Thread-safe.

        Does nothing before `start`, which reads the database.
        """
        with self._changing:
            record = self.store.federation(federation)
            if self._on_failure is None or record.status is FederationStatus.CREATED:
                return
            running = self._running.get(federation)
            if running is not None and self._goes_on(running.service, record):
                self._end(running)  # its state is rebuilt from the database, and devices receive a new epoch
                running = None
            if running is None:
                self._running[federation] = self._run(record)
            else:
                running.service.steer(record, resume=resume)

    def close(self) -> None:
        """Stop all services."""
        with self._changing:
            for running in self._running.values():
                running.service.stop()
            for running in self._running.values():
                self._end(running)

    def _goes_on(self, service: Service, record: FederationRecord) -> bool:
        """Whether a finished federation has been given more rounds."""
        is_stopped = record.status.is_ended
        is_over = service.state.phase is Phase.FINISHED
        return is_over and not is_stopped and self.store.round_state(record.id).phase is not Phase.FINISHED

    def _end(self, running: _Running) -> None:
        running.service.stop()
        running.thread.submit(running.service.close).result()
        running.thread.shutdown()

    def _run(self, record: FederationRecord) -> _Running:
        thread = ThreadPoolExecutor(1, f"federation {record.id}")
        service = thread.submit(self._started, record).result()
        work = thread.submit(service.run)
        work.add_done_callback(self._ended)
        return _Running(service, thread, work)

    def _started(self, record: FederationRecord) -> Service:
        service = Service(self._context_of(record))
        service.start()
        return service

    def _ended(self, work: Future[None]) -> None:
        error = work.exception()
        if error is not None and self._on_failure is not None:
            self._on_failure(error)
