"""Executes the round engine's commands with database, worker and broker. Holds the engine's state; decides nothing itself.

Every command is stored durably before any message about it is sent, so a coordinator that is killed between two commands resumes from
the database (`restart`).
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from coordinator.aggregation import jobs
from coordinator.aggregation.worker import spill_directory
from coordinator.aggregation.worker_handle import AggregationWorker
from coordinator.errors import StoreError
from coordinator.messaging.publisher import Publisher
from coordinator.rounds import signals
from coordinator.rounds.engine import Opening, Phase, RoundState, shares_of, transition
from coordinator.rounds.records import AggregateRecord, FederationRecord, FederationStatus, UpdateRecord
from coordinator.service.reports import MergeProgress
from coordinator.service.service_context import ServiceContext
from coordinator.storage.artifacts import Pruner
from coordinator.sums import SealedSums
from coordinator.updates.published_artifacts import PublishedArtifacts
from coordinator.updates.receiver import Receiver
from coordinator.updates.screening import Choice, Screening, left_out, odd_updates, plateau_reason
from fedcg.event_log import EventValue
from fedcg.wire.messages.schemas import Outcome, RoundAttempt

PACE_ROUNDS = 10
"""Number of recent rounds from which a device's pace is estimated."""
_REPORTS: dict[type[jobs.WorkerEvent], str] = {
    jobs.WorkerReady: "worker_ready",
    jobs.WorkerDied: "worker_died",
    jobs.PhaseStarted: "phase_started",
    jobs.Progressed: "aggregate_step",
    jobs.UpdateAdded: "teacher_done",
    jobs.JobEased: "merge_eased",
}
"""The event log lines that contain a worker's report unchanged."""


@dataclass(eq=False)
class RoundDriver:
    """Drives the rounds of one federation.

    Args:
        context: the dependencies of the service.
        publisher: publishes the messages.
        published: the artifacts that devices may fetch.
        worker: merges the updates.
        receiver: holds the updates in transfer.
        sums: the sealed sums.

    Attributes:
        state: the state of the federation.
        is_announced: whether the current offer (or end) was passed to the broker; if not, `announce` must be repeated.
        announced_at: when `announce` was last called; monotonic seconds.
        worker_pid: the worker's process id, once it is ready.
        merge: the running or last merge; None before the first one.
        odd: by client, its last update if it was unlike the others.
    """

    context: ServiceContext
    publisher: Publisher
    published: PublishedArtifacts
    worker: AggregationWorker
    receiver: Receiver
    sums: SealedSums
    announced_at: float = field(default=0.0, init=False)
    worker_pid: int | None = field(default=None, init=False)
    merge: MergeProgress | None = field(default=None, init=False)
    odd: Mapping[str, UpdateRecord] = field(default_factory=dict, init=False)
    _base: str = field(default="", init=False)
    _shares: dict[str, float] = field(
        default_factory=dict, init=False
    )  # share of the local steps for each client of the open attempt
    is_announced: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._store = self.context.store
        self._events = self.context.events
        self._id = self.context.federation.id
        self._pruner = Pruner(
            self.context.store, self.context.artifacts, self._id, self.context.keep_rounds, self._forget
        )
        self._screening = Screening(self.context.store, self._id, self.context.robustness, self.context.events)
        self._record = self.context.federation
        opening = Opening(self.context.rounds.gather_s, self.context.rounds.retry_s, self.context.worker.secret)
        self.state = RoundState(self.context.federation.policy, opening=opening)
        self._do_what: dict[type[Any], Callable[[Any], object]] = {
            signals.OpenAttempt: self._open_attempt,
            signals.ResumeAttempt: self._resume_attempt,
            signals.MoveDeadline: self._move_deadline,
            signals.Invite: lambda command: self.invite(command.client),
            signals.Distil: self._distil,
            signals.FailAttempt: self._fail_attempt,
            signals.Stall: lambda command: self._events.write("stalled", reason=command.reason),
            signals.Finish: self._finish,
        }

    @property
    def requires_cohort_secret(self) -> bool:
        """Whether only devices with the cohort secret are invited, since a different secret would spoil a sum."""
        return self.state.policy.require_cohort or bool(self.context.spec.sealed)

    def restart(self) -> None:
        """Rebuild the state from the database and resume."""
        stored = self._store.round_state(self._id)
        opening = replace(self.state.opening, failed_at=stored.opening.failed_at)
        self.state = replace(stored, opening=opening, barred=self.state.barred)
        aggregates = self._store.aggregates(self._id)
        for aggregate in aggregates:
            self.published.allow(aggregate.artifact)
        self._report_pruned(self._pruner.sweep(self.context.clock()))
        self._prune(aggregates[-1].round)
        self.published.allow(self.context.federation.spec)
        self._events.write("resumed", phase=self.state.phase.value, round=self.state.round)
        self._judge_devices(self.state.round)
        self.odd = odd_updates(self._store, self._id, self.state.round - 1)
        self.apply(signals.Restarted())
        self._follow_status(self._record)

    def follow(self, record: FederationRecord, *, resume: bool = False) -> None:
        """Apply an operator's changes; `resume` also resumes a stalled federation."""
        before, self._record = self._record, record
        self._judge_devices(self.state.round)  # an operator may have readmitted one
        if record.policy != self.state.policy:
            self.apply(signals.PolicyChanged(record.policy))
        if (record.status, record.status_reason) != (before.status, before.status_reason):
            self._follow_status(record)
        if resume:
            self.apply(signals.Resumed())

    def _follow_status(self, record: FederationRecord) -> None:
        if record.status.is_ended:
            self.apply(signals.Stopped(record.status_reason))
        elif record.status is FederationStatus.PAUSED:
            self.apply(signals.Paused(record.status_reason))
        elif self.state.paused:
            self.apply(signals.Resumed())

    def apply(self, event: signals.Event) -> None:
        """Pass an event to the engine and execute its commands."""
        if isinstance(event, signals.UpdateRefused) and event.reason:
            self._judge_devices(self.state.round)
        self.state, to_do = transition(self.state, event, self.context.clock())
        for command in to_do:
            self._do_what[type(command)](command)
        if isinstance(event, signals.CameOnline):
            self._report_odd(event.client)

    def follow_worker(self, event: jobs.WorkerEvent) -> None:
        """Write a worker's report to the event log and act on it."""
        if name := _REPORTS.get(type(event)):
            self._events.write(name, **asdict(event))
        if isinstance(event, jobs.Progressed):
            self.merge = MergeProgress.after(self.merge, event)
        elif isinstance(event, jobs.JobDone | jobs.JobFailed | jobs.WorkerDied) and self.merge is not None:
            self.merge = self.merge.ended()
        if isinstance(event, jobs.WorkerReady):
            self.worker_pid = event.pid
        elif isinstance(event, jobs.WorkerDied):
            self.worker_pid = None
        elif isinstance(event, jobs.UpdateFailed):
            self._update_failed(event)
        elif isinstance(event, jobs.Assessed):
            self._assessed(event)
        elif isinstance(event, jobs.JobFailed):
            self.apply(signals.AggregationFailed(event.round, event.attempt, event.reason))
        elif isinstance(event, jobs.JobDone):
            self._job_done(event)

    def _update_failed(self, failed: jobs.UpdateFailed) -> None:
        """Reject an accepted update that can't be merged; its round continues without it."""
        state, client = self.state, failed.client
        if state.at != failed.at or client not in state.updates:
            return
        reason = failed.reason[:300]
        self._store.reject_update(self._id, state.at, client, reason)
        self._write("update_rejected", state.at, client=client, reason=reason)
        self.apply(signals.UpdateRefused(state.round, state.attempt, client, reason))

    def _judge_devices(self, round_number: int) -> None:
        """Leave repeat offenders out of the next attempts, and readmit those whose time is over."""
        before, now = self.state.left_out, left_out(self._store, self._id, round_number)
        self.state = replace(self.state, left_out=now)
        for client in sorted(now.keys() - before.keys()):
            self._events.write("left_out", client=client, round=round_number, reason=now[client])
        for client in sorted(before.keys() - now.keys()):
            self._events.write("let_in", client=client, round=round_number)

    def _job_done(self, done: jobs.JobDone) -> None:
        """Close the attempt with the aggregate that the worker stored."""
        if self.state.phase is not Phase.DISTILLING or self.state.at != done.at:
            return
        for artifact in (done.aggregate, done.server_state):
            self.context.artifacts.keep(artifact)
        now = self.context.clock()
        record = AggregateRecord(self._id, done.round, done.attempt, done.aggregate, done.size, done.server_state, now)
        self._store.close_attempt(record, jobs.EASED.get(done.ease, ""))
        self.published.allow(done.aggregate)
        self._write("aggregate_stored", done.at, artifact=done.aggregate, size=done.size)
        if done.sum_lost:
            self.sums.lost(done.at, done.sum_lost)
        self._drop_rows(done)
        self._prune(done.round)
        self._judge_devices(done.round + 1)
        plateau = plateau_reason(self._store, self._id, self.state.policy, self.context.spec.trains_in)
        if plateau:  # before the next attempt opens
            self._store.set_status(self._id, FederationStatus.STOPPED, plateau)
            self.apply(signals.Paused(plateau))
        self.apply(signals.AggregateStored(done.round, done.attempt))
        if plateau:
            self.apply(signals.Stopped(plateau))

    def _drop_rows(self, ended: jobs.JobDone | signals.FailAttempt) -> None:
        spilled = spill_directory(self.context.worker.spill, self._id, ended.round, ended.attempt)
        shutil.rmtree(spilled, ignore_errors=True)

    def _prune(self, closed: int) -> None:
        self._report_pruned(self._pruner.prune(closed))

    def _report_pruned(self, deleted: tuple[int, int]) -> None:
        files, size = deleted
        if files:
            self._events.write("pruned", files=files, bytes=size)

    def _forget(self, artifact: str) -> None:
        self.published.forget(artifact)
        self.publisher.sender.forget(artifact)

    def announce(self) -> None:
        """Publish the current offer, or the end, on the retained topic; does nothing while the link is down."""
        self.is_announced, self.announced_at = True, time.monotonic()
        state = self.state
        if state.phase in (Phase.WAITING, Phase.PAUSED, Phase.STALLED):
            return
        finished = state.phase is Phase.FINISHED
        aggregate = self._store.aggregates(self._id)[-1].artifact if finished else self._base
        spec_ref = self.published.source(self.context.federation.spec).ref
        aggregate_ref = self.published.source(aggregate).ref
        if finished:
            self.is_announced = self.publisher.finished(state.at, spec_ref, aggregate_ref)
        else:
            rounds, deadline_at = state.policy.rounds, state.deadline_at
            self.is_announced = self.publisher.offer(state.at, spec_ref, aggregate_ref, rounds, deadline_at)

    def _open_attempt(self, command: signals.OpenAttempt) -> None:
        base, now = self._begin(command), self.context.clock()
        times = self._store.overview.round_times(self._id, command.round - PACE_ROUNDS)
        known = {client: times[client] for client in times.keys() & command.participants}
        self._shares = shares_of(self.state.policy, known)
        self._store.open_attempt(
            self._id, command.at, base.artifact, command.participants, now, command.deadline_at, self._shares
        )
        rounds, participants = self.state.policy.rounds, sorted(command.participants)
        self._write("attempt_opened", command.at, rounds=rounds, participants=participants, aggregate=base.artifact)
        self.worker.open(self._job(command, base))
        self.sums.begin(command.at, command.participants)
        self.announce()
        source = self.published.source(base.artifact)
        self.publisher.broadcast(source, lambda: self.state.is_open(command.at))

    def _resume_attempt(self, command: signals.ResumeAttempt) -> None:
        base = self._begin(command)
        self._store.move_deadline(self._id, command.at, command.deadline_at)
        people = self._store.participants(self._id, command.at)
        self._shares = {person.client: person.share for person in people}
        self.sums.begin(command.at, self._shares)
        accepted = self._store.accepted(self._id, command.at)
        self._write("attempt_resumed", command.at, stored=list(accepted))
        self.worker.open(self._job(command, base))
        for update in accepted.values():
            self.context.artifacts.local(update.artifact)
            self.worker.add(update.client, update.artifact)

    def _move_deadline(self, command: signals.MoveDeadline) -> None:
        self._store.move_deadline(self._id, command.at, command.deadline_at)
        if command.reason:
            self._write("deadline_moved", command.at, reason=command.reason)

    def invite(self, client: str) -> None:
        """Ask a participant of the open attempt (again) for its update."""
        self.publisher.invite(client, self.state.at, self._shares.get(client, 1.0))

    def _distil(self, command: signals.Distil) -> None:
        updates = self._store.start_distilling(self._id, command.at, self.context.clock())
        # The database decides which updates arrived in time: one may have just been stored.
        accepted = frozenset(update.client for update in updates)
        self.state = replace(self.state, updates=accepted, declined=self.state.declined - accepted)
        self.receiver.end_attempt(command.at, Outcome.LATE, "the round was closed without this update")
        self._write("distilling", command.at, clients=sorted(accepted))
        self.worker.assess(self._screening.artifacts(command.at))

    def _assessed(self, assessed: jobs.Assessed) -> None:
        """Merge the updates chosen by the screening; with too few, the attempt fails."""
        state, quorum = self.state, self.state.policy.quorum
        if state.phase is not Phase.DISTILLING or state.at != assessed.at:
            return
        accepted = self._screening.artifacts(assessed.at)
        if assessed.figures.keys() != accepted.keys():
            self.worker.assess(accepted)  # one was rejected in the meantime
            return
        choice = self._screening.choose(assessed.at, assessed.figures, quorum)
        odd = choice.quarantined
        self.state = replace(state, updates=state.updates - odd, declined=state.declined | odd)
        self.odd = odd_updates(self._store, self._id, state.round - 1)
        for client in choice.odd:
            self._report_odd(client)
        reason = choice.too_few(len(self.state.updates), quorum)
        if reason:
            self.apply(signals.AggregationFailed(assessed.round, assessed.attempt, reason))
        else:
            self.sums.open(self.state.updates, partial(self._merge, assessed.at, choice))

    def _report_odd(self, client: str) -> None:
        """Send a device the result of its last update if it was unlike the others; repeated in each session."""
        if (update := self.odd.get(client)) is not None:
            at = RoundAttempt(update.round, update.attempt)
            self.publisher.receipt(client, at, update.artifact, update.outcome, update.reason)

    def _merge(self, at: RoundAttempt, choice: Choice, opened: jobs.OpenedSum) -> None:
        if self.state.phase is Phase.DISTILLING and self.state.at == at:  # opening a sum takes a while
            self._write("merging", at, clients=[client for client, *_ in choice.updates])
            self.worker.finish(choice.updates, choice.limits, opened)

    def _fail_attempt(self, command: signals.FailAttempt) -> None:
        now, first_attempt = self.context.clock(), command.first_attempt
        self._store.fail_attempt(self._id, command.at, command.reason, now, first_attempt)
        self.receiver.end_attempt(command.at, Outcome.CLOSED, "the attempt ended without an aggregate")
        self.sums.end()
        self._write("attempt_failed", command.at, reason=command.reason)
        self._drop_rows(command)
        self._judge_devices(command.round)

    def _finish(self, command: signals.Finish) -> None:
        final = self._store.aggregates(self._id)[-1]
        self._write("finished", self.state.at, aggregate=final.artifact, reason=self.state.reason)
        self.announce()

    def _begin(self, command: signals.OpenAttempt | signals.ResumeAttempt) -> AggregateRecord:
        """The aggregate that an attempt starts from."""
        record = self._store.aggregate(self._id, command.round - 1)
        if record is None:
            raise StoreError(f"the aggregate of round {command.round - 1} is missing from the database")
        self._base = record.artifact
        return record

    def _job(self, command: signals.OpenAttempt | signals.ResumeAttempt, base: AggregateRecord) -> jobs.Job:
        spec = self.context.federation.spec
        for artifact in (spec, base.artifact, base.server_state):
            self.context.artifacts.local(artifact)  # the worker reads files
        limits = self._screening.limits(command.round)
        return jobs.Job(self._id, command.round, command.attempt, spec, base.artifact, base.server_state, limits)

    def _write(self, name: str, at: RoundAttempt, **values: EventValue) -> None:
        self._events.write(name, **vars(at), **values)
