"""What the aggregation worker reports: into the event log, and on to the round engine. Used by the service alone, on its event loop."""

from __future__ import annotations

from coordinator.aggregation_messages import (
    JobDone,
    JobFailed,
    PhaseStarted,
    Progressed,
    UpdateAdded,
    UpdateFailed,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
)
from coordinator.conductor import Conductor
from coordinator.rounds import AggregationFailed
from fedcg.event_log import EventLog


class WorkerReports:
    """Takes the events of the worker.

    Args:
        events: the event log.
        conductor: drives the rounds.

    Attributes:
        pid: the worker's process, once it is ready.
    """

    def __init__(self, events: EventLog, conductor: Conductor) -> None:
        self.pid: int | None = None
        self._events = events
        self._conductor = conductor

    async def take(self, event: WorkerEvent) -> None:
        """Write an event to the log, and tell the round engine what it has to know."""
        if isinstance(event, WorkerReady):
            self.pid = event.pid
            self._events.write("worker_ready", pid=event.pid, threads=event.threads, device=event.device)
        elif isinstance(event, WorkerDied):
            self.pid = None
            self._events.write("worker_died", pid=event.pid, deaths=event.deaths, reason=event.reason)
        elif isinstance(event, PhaseStarted):
            self._write_progress("phase_started", event, client=event.client)
        elif isinstance(event, Progressed):
            self._write_progress("aggregate_step", event, step=event.step, steps=event.steps)
        elif isinstance(event, UpdateAdded):
            self._events.write("teacher_done", client=event.client, round=event.round, attempt=event.attempt)
        elif isinstance(event, UpdateFailed):
            await self._conductor.update_failed(event)
        elif isinstance(event, JobFailed):
            await self._conductor.apply(AggregationFailed(event.round, event.attempt, event.reason))
        elif isinstance(event, JobDone):
            await self._conductor.job_done(event)

    def _write_progress(self, name: str, event: PhaseStarted | Progressed, **values: str | int) -> None:
        self._events.write(name, phase=event.phase, round=event.round, attempt=event.attempt, pid=event.pid, **values)
