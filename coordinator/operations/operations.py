"""All that operators can do with a coordinator, in one place: the API, the page and the commands without a coordinator call it.

Blocks; from any thread. Changes are made one after the other, each in one transaction of the database: a running coordinator follows
it at once, one that starts later finds it there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import ValidationError

from coordinator.broker.access_lists import publish_access
from coordinator.errors import NotFoundError, PlanError, SteeringError, StoppingError, StoreError
from coordinator.members.enrolment import WantedToken, create_token, revoke_token
from coordinator.members.membership import Revoked, revoke
from coordinator.operations import create_federation
from coordinator.operations.create_federation import Complete, make_artifacts, too_few_for_sums
from coordinator.paths import Home
from coordinator.pki.signing_keys import links_for
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import (
    AggregateRecord,
    DeviceRecord,
    DeviceState,
    FederationRecord,
    FederationStatus,
    TokenRecord,
)
from coordinator.storage.artifacts import artifacts_of
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from fedcg.config_file import listed, problems_of
from fedcg.errors import EXISTS
from fedcg.event_log import EventLog, log_text
from fedcg.learning.spec import FederationPlan, FederationSpec, RoundPolicy
from fedcg.wire.messages.enrolment_messages import Token

NO_REASON = "no reason given"
MAX_REASON = 300


ResultT = TypeVar("ResultT")
GivenP = ParamSpec("GivenP")


def federation_of(store: Store, federation: str) -> FederationRecord:
    """One federation.

    Raises:
        NotFoundError: there is none of that id.
    """
    try:
        return store.federation(federation)
    except StoreError as error:
        there = ", ".join(record.id for record in store.federations()) or "none"
        raise NotFoundError(f"there is no federation {federation[:80]!r}; there are: {there}") from error


def device_of(store: Store, device: str) -> DeviceRecord:
    """One device, whatever its state.

    Raises:
        NotFoundError: there is none of that id.
    """
    found = store.device(device)
    if found is None:
        raise NotFoundError(f"there is no device {device[:80]!r}; `fedcg device list` has all")
    return found


def _one_at_a_time(
    change: Callable[Concatenate[Operations, GivenP], ResultT],
) -> Callable[Concatenate[Operations, GivenP], ResultT]:
    """A change that waits until the one before it is made."""

    @wraps(change)
    def alone(operations: Operations, /, *given: GivenP.args, **named: GivenP.kwargs) -> ResultT:
        with operations._changing:  # noqa: SLF001 - a method of the class
            return change(operations, *given, **named)

    return alone


@dataclass(frozen=True)
class Operations:
    """What an operator can change.

    Attributes:
        home: the coordinator's directory.
        store: its database.
        events: the event log.
        follow: `Coordinator.follow`.
        clock: unix time.
        stopping: set when the program ends: nothing is created any more.
    """

    home: Home
    store: Store
    events: EventLog
    follow: Callable[..., None] = lambda federation, resume=False: None
    clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)
    _changing: threading.RLock = field(default_factory=threading.RLock)

    @_one_at_a_time
    def start(self, federation: str) -> FederationRecord:
        """Start a federation that was created and not started. Repeating it changes nothing.

        Raises:
            SteeringError: it is paused or over.
        """
        record = federation_of(self.store, federation)
        if record.status is FederationStatus.RUNNING:
            return record
        if record.status is not FederationStatus.CREATED:
            raise SteeringError(f"{federation} was started already; it is {record.status.value}")
        return self._change(record, FederationStatus.RUNNING)

    @_one_at_a_time
    def pause(self, federation: str, reason: str = "") -> FederationRecord:
        """Let the open attempt end as it would, and open no other one. Repeating it changes the reason, where one is given.

        Raises:
            SteeringError: it is not running, or the reason is too long.
        """
        record, reason = federation_of(self.store, federation), bounded_reason(reason)
        if record.status is FederationStatus.PAUSED and not reason:
            return record
        self._require_life(record)
        return self._change(
            record, FederationStatus.PAUSED, reason or f"{NO_REASON}; `fedcg federation resume` lets it go on"
        )

    @_one_at_a_time
    def resume(self, federation: str) -> FederationRecord:
        """Let a federation go on that an operator paused, or that stalled; failed attempts are counted anew.

        Raises:
            SteeringError: it is not running.
        """
        record = federation_of(self.store, federation)
        self._require_life(record)
        self.store.resume(federation)
        return self._change(record, FederationStatus.RUNNING, resume=True)

    @_one_at_a_time
    def stop(self, federation: str, reason: str = "") -> FederationRecord:
        """End a federation now: its devices keep the last aggregate; an open attempt fails. Repeating it changes the reason, where one is given.

        Raises:
            SteeringError: it was never started, or it is finished, or the reason is too long.
        """
        record, reason = federation_of(self.store, federation), bounded_reason(reason)
        if record.status is not FederationStatus.STOPPED:
            self._require_life(record)
        elif not reason:
            return record
        return self._change(record, FederationStatus.STOPPED, reason or NO_REASON)

    @_one_at_a_time
    def archive(self, federation: str) -> FederationRecord:
        """Take a federation that is over, or was never started, off lists and page; its data stays, and `extend` brings it back.

        Raises:
            SteeringError: it is not over yet.
        """
        record = federation_of(self.store, federation)
        if (
            not (record.status.is_ended or self._is_finished(federation))
            and record.status is not FederationStatus.CREATED
        ):
            raise SteeringError(f"{federation} is not over; `fedcg federation stop {federation}` ends it")
        return self._change(record, FederationStatus.ARCHIVED, record.status_reason)

    @_one_at_a_time
    def change_policy(
        self, federation: str, changes: Mapping[str, Any], check: Callable[[RoundPolicy], None] = lambda policy: None
    ) -> FederationRecord:
        """Change fields of the policy, when `check` lets the present one pass; the open attempt goes on by the new one.

        Raises:
            SteeringError: a field or a value that can't be; names all of them. Fewer clients than the method's sums take. Other rounds of one that
                is over.
        """
        record = federation_of(self.store, federation)
        check(record.policy)
        policy = self._changed(record, changes)
        if policy.rounds != record.policy.rounds and (record.status.is_ended or self._is_finished(federation)):
            raise SteeringError(f"{federation} is over; `fedcg federation extend {federation} --rounds N` adds rounds")
        return self._set_policy(federation, policy, changes)

    def _set_policy(self, federation: str, policy: RoundPolicy, changes: Collection[str]) -> FederationRecord:
        self.store.set_policy(federation, policy)
        self.events.write("policy_changed", federation=federation, changed=sorted(changes))
        return self._followed(federation)

    @_one_at_a_time
    def extend(self, federation: str, rounds: int) -> FederationRecord:
        """Add rounds to a federation, also to one that is over or was stopped: it goes on from its last aggregate.

        Raises:
            SteeringError: fewer than one, or it was never started.
        """
        record = federation_of(self.store, federation)
        if rounds < 1:
            raise SteeringError(f"rounds = {rounds}: add at least 1")
        if not record.status.is_ended:
            more = {"rounds": record.policy.rounds + rounds}
            return self._set_policy(federation, self._changed(record, more), more)
        closed = self.store.aggregates(federation)[-1].round
        policy = self._changed(record, {"rounds": closed + rounds})
        self.store.set_policy(federation, policy)
        self.store.resume(federation)  # it may have stalled before
        return self._change(record, FederationStatus.RUNNING, resume=True)

    @_one_at_a_time
    def forget(self, federation: str, devices: Collection[str]) -> FederationRecord:
        """Invite devices no more, for good, and learn anew without them: one round more where it is over, or in its last one.

        Raises:
            SteeringError: what it learns from a device can't be taken out again, or (NotFoundError) there is no such device.
        """
        record = federation_of(self.store, federation)
        if not self._spec(record).is_exact:
            raise SteeringError(
                f"{federation} trains weights ({record.method}), and what they have learnt from a device's images can't be taken out again. "
                "`fedcg device disable` or `revoke` keeps the device out of rounds; `fedcg federation create PLAN` begins anew without it"
            )
        before = set(record.forgotten.split())
        if new := {device_of(self.store, device).id for device in devices} - before:
            self.store.forget(federation, before | new)
            self.events.write("forgotten", federation=federation, clients=sorted(new))
            begun = self._last_begun(federation)
            if begun and (record.status.is_ended or begun >= record.policy.rounds):
                return self.extend(federation, 1)
        return self._followed(federation)

    @_one_at_a_time
    def disable(self, device: str, reason: str = "") -> DeviceRecord:
        """Invite a device no more until it is enabled; it stays enrolled. Repeating it changes the reason alone, where one is given.

        Raises:
            SteeringError: it is no member any more, or (NotFoundError) never was.
        """
        return self._device(device, self.clock(), reason)

    @_one_at_a_time
    def enable(self, device: str) -> DeviceRecord:
        """Invite a disabled device again. Repeating it changes nothing.

        Raises:
            SteeringError: it is no member any more, or (NotFoundError) never was.
        """
        return self._device(device, None, "")

    def create_federation(
        self, plan: FederationPlan, *, start: bool = True, continued_from: str | None = None
    ) -> FederationRecord:
        """Open a federation, and start it unless that comes later. Takes seconds: a process with torch makes the first weights.

        Args:
            plan: the operator's plan.
            start: else it is only created.
            continued_from: a federation whose last aggregate has the initial weights.

        Raises:
            PlanError: the name is taken, or the method or the networks refuse the plan.
            NotFoundError: there is no federation `continued_from`.
            StoppingError: the coordinator ends.
        """
        if continued_from is not None:
            federation_of(self.store, continued_from)
        record = open_federation(
            self.home,
            self.store,
            plan,
            start=start,
            continued_from=continued_from,
            complete=self.complete,
            registering=self._registering(),
        )
        with changing_members(self.home):
            publish_access(self.home)
        self.events.write("federation_created", federation=record.id, started=start, continued_from=continued_from)
        if record.status is FederationStatus.RUNNING:
            self.follow(record.id)
        return record

    @contextmanager
    def _registering(self) -> Iterator[None]:
        with changing_members(self.home):
            if self.stopping.is_set():
                raise StoppingError(create_federation.STOPPING)
            yield

    def complete(self, request: str) -> tuple[int, str]:
        """Complete a plan in a process, which ends with this program."""
        return create_federation.in_a_process(request, self.stopping)

    def revoke_device(self, device: str, reason: str = "") -> Revoked:
        """Cut a device off: certificates, keys and the session that it may have. Repeating it repeats the steps that failed.

        Raises:
            NotFoundError: there is none of that id.
        """
        device_of(self.store, device)
        done = revoke(self.home, self.store, device, bounded_reason(reason), self.clock())
        self.events.write(
            "device_revoked",
            client=device,
            reason=reason,
            certificates=done.certificates,
            reloaded=done.broker_reloaded,
        )
        return done

    def create_enrolment_token(self, wanted: WantedToken) -> tuple[Token, TokenRecord]:
        """Make a one-time token with which a device enrols.

        Raises:
            EnrolmentError: nothing listens for it, or the device can't be enrolled or replaced.
        """
        token, record = create_token(self.home, self.store, self.clock(), wanted)
        self.events.write("token_created", token=token.id, client=token.device or "", until=record.expires_at)
        return token, record

    def revoke_enrolment_token(self, token: str) -> TokenRecord:
        """Make a token that was not used yet unusable.

        Raises:
            NotFoundError: there is none of that id.
            EnrolmentError: it was used already.
        """
        revoked = revoke_token(self.store, token, self.clock())
        self.events.write("token_revoked", token=token)
        return revoked

    def _spec(self, record: FederationRecord) -> FederationSpec:
        return FederationSpec.parse(artifacts_of(self.home).get(record.spec))

    def _changed(self, record: FederationRecord, changes: Mapping[str, Any]) -> RoundPolicy:
        """The policy of a federation with other values, checked as a plan with them would be, and against its rounds."""
        fixed = [
            name for name in changes if name in FederationPlan.model_fields and name not in RoundPolicy.model_fields
        ]
        problems = [
            f"{name}: is fixed when a federation is opened; `fedcg federation continue` opens one" for name in fixed
        ]
        wanted = {name: value for name, value in changes.items() if name not in fixed}
        try:
            policy = RoundPolicy.model_validate({**record.policy.model_dump(), **wanted})
        except ValidationError as error:
            problems += [line.removeprefix("(file): ") for line in problems_of(RoundPolicy, error)]
            wrong = {one["loc"][0] for one in error.errors()}
            right = {name: value for name, value in wanted.items() if name not in wrong}
            policy = record.policy.model_copy(update=right)
        if "min_clients" in changes and (problem := too_few_for_sums(self._spec(record), policy.min_clients)):
            problems.append(f"min_clients: {problem}")
        least = self._last_begun(record.id)
        if policy.rounds < least:
            problems.append(
                f"rounds = {policy.rounds}: {record.id} is in round {least} already; stop it to end it earlier"
            )
        if problems:
            raise SteeringError(listed(f"policy of {record.id}", problems))
        return policy

    def _last_begun(self, federation: str) -> int:
        """The last round that is open or closed, 0 before the first."""
        state = self.store.round_state(federation)
        return state.round - (state.phase not in (Phase.COLLECTING, Phase.DISTILLING, Phase.FINISHED))

    def _require_life(self, record: FederationRecord) -> None:
        if record.status is FederationStatus.CREATED:
            raise SteeringError(f"{record.id} was not started yet; `fedcg federation start {record.id}` does")
        if record.status.is_ended:
            why = f" ({record.status_reason})" if record.status_reason else ""
            more = "`fedcg federation extend` gives it more rounds"
            raise SteeringError(f"{record.id} was {record.status.value}{why}; {more}")

        if self._is_finished(record.id):
            more = f"`fedcg federation extend {record.id} --rounds N` adds some"
            raise SteeringError(f"{record.id} is finished: all its rounds are closed; {more}")

    def _is_finished(self, federation: str) -> bool:
        return self.store.round_state(federation).phase is Phase.FINISHED

    def _change(
        self, record: FederationRecord, status: FederationStatus, reason: str = "", *, resume: bool = False
    ) -> FederationRecord:
        self.store.set_status(record.id, status, reason)
        self.events.write("steered", federation=record.id, status=status.value, reason=reason)
        return self._followed(record.id, resume=resume)

    def _followed(self, federation: str, *, resume: bool = False) -> FederationRecord:
        self.follow(federation, resume=resume)
        return self.store.federation(federation)

    def _device(self, device: str, at: float | None, reason: str) -> DeviceRecord:
        known, reason = device_of(self.store, device), bounded_reason(reason)
        if known.state is not DeviceState.ENROLLED:
            raise SteeringError(f"{device} is not enrolled; it is {known.state.value}")
        if (known.disabled_at is None) != (at is None) or (reason and reason != known.disabled_because):
            self.store.disable(device, known.disabled_at if at and known.disabled_at else at, reason)
            name = "device_enabled" if at is None else "device_disabled"
            self.events.write(name, client=device, reason=reason)
            for record in self.store.federations():
                self.follow(record.id)
        return device_of(self.store, device)


def open_federation(
    home: Home,
    store: Store,
    plan: FederationPlan,
    *,
    start: bool = True,
    continued_from: str | None = None,
    complete: Complete | None = None,
    registering: AbstractContextManager[None] | None = None,
) -> FederationRecord:
    """Complete a plan to a spec, make the initial aggregate, and register both.

    The broker's lists are as before: `publish_access` is for whoever knows that one runs.

    Args:
        home: the coordinator's directory.
        store: its database.
        plan: the operator's plan.
        start: else it is only created, and `Operations.start` starts it.
        continued_from: a federation whose last aggregate has the initial weights.
        complete: the process that completes the plan, where one was started before.
        registering: `changing_members`, which is held for the registration alone; None where the caller holds it.

    Raises:
        PlanError: there is a federation of that name, or the method or the networks refuse the plan.
        StoreError: there is no federation `continued_from`.
    """
    _check_new(store, plan)
    config, first = home.config(), None
    if continued_from is not None:
        first = (store.federation(continued_from).spec, store.aggregates(continued_from)[-1].artifact)
        for artifact in first:
            artifacts_of(home).local(artifact)  # the process that makes the new artifacts reads the directory
    public = home.public_data(config)
    made = make_artifacts(plan, home.artifacts, public, config.aggregation.public_images, first, complete)
    artifacts = artifacts_of(home)
    for artifact in (made.spec, made.aggregate, made.server_state):
        artifacts.keep(artifact)
    now = time.time()
    record = FederationRecord(
        id=plan.federation,
        method=plan.method,
        spec=made.spec,
        policy=RoundPolicy(**plan.model_dump(include=set(RoundPolicy.model_fields))),
        created_at=now,
        status=FederationStatus.RUNNING if start else FederationStatus.CREATED,
        continued_from=continued_from,
    )
    initial = AggregateRecord(plan.federation, 0, 0, made.aggregate, made.aggregate_bytes, made.server_state, now)
    with registering or nullcontext():
        _check_new(store, plan)
        store.add_federation(record, initial, links_for(home, store, record.id), now)
    return record


def _check_new(store: Store, plan: FederationPlan) -> None:
    if plan.federation in [record.id for record in store.federations()]:
        raise PlanError(f"there is a federation {plan.federation!r} already; choose another name", exit_code=EXISTS)


def bounded_reason(reason: str) -> str:
    """A reason as tables and terminals show it.

    Raises:
        SteeringError: it is too long.
    """
    if len(reason) > MAX_REASON:
        raise SteeringError(f"the reason has {len(reason)} characters; write at most {MAX_REASON}")
    return log_text(reason)
