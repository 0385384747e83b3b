"""All changes that operators can make to a coordinator. The API, the page and commands without a running coordinator use it.

The methods block and are thread-safe. Changes run one after the other, each in one database transaction. A running coordinator
applies a change immediately; otherwise it applies when one starts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field, replace
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from pydantic import Field, ValidationError

from coordinator.broker.access_lists import publish_access
from coordinator.errors import NotFoundError, PlanError, SteeringError, StoppingError, StoreError
from coordinator.members.enrolment import MAX_LABELS, Labels, Site, WantedToken, create_tokens, ids_in, revoke_token
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
from fedcg.config_file import Settings, listed, problems_of
from fedcg.errors import EXISTS
from fedcg.event_log import EventLog, log_text
from fedcg.learning.spec import FederationPlan, FederationSpec, RoundPolicy
from fedcg.values import Value
from fedcg.wire.messages.enrolment_messages import Token

NO_REASON = "no reason given"
MAX_REASON = 300
MAX_PIN = 40


ResultT = TypeVar("ResultT")
GivenP = ParamSpec("GivenP")


def federation_of(store: Store, federation: str) -> FederationRecord:
    """One federation.

    Raises:
        NotFoundError: no federation has this id.
    """
    try:
        return store.federation(federation)
    except StoreError as error:
        there = ", ".join(record.id for record in store.federations()) or "none"
        raise NotFoundError(f"there is no federation {federation[:80]!r}; existing ones: {there}") from error


def version_of(store: Store, federation: str, round_number: int) -> AggregateRecord:
    """The shared model of a round; round 0 has the initial one.

    Raises:
        NotFoundError: there is no such federation or version.
    """
    record = store.aggregate(federation_of(store, federation).id, round_number)
    if record is None:
        raise NotFoundError(f"{federation} has no version of round {round_number}")
    return record


def device_of(store: Store, device: str) -> DeviceRecord:
    """One device in any state.

    Raises:
        NotFoundError: no device has this id.
    """
    found = store.device(device)
    if found is None:
        raise NotFoundError(f"there is no device {device[:80]!r}; `fedcg device list` lists all devices")
    return found


class Description(Settings):
    """Changes of what operators note about a device. None does not change; an empty text deletes.

    Attributes:
        labels: replaces all labels: words of a-z, 0-9 and dashes, at most 16.
        add_labels, remove_labels: change some of them.
        site: where the device is.
        note: anything else, on one line.
    """

    labels: Labels | None = None
    add_labels: Labels = ()
    remove_labels: Labels = ()
    site: Site | None = None
    note: Annotated[str, Field(max_length=500)] | None = None


def _one_at_a_time(
    change: Callable[Concatenate[Operations, GivenP], ResultT],
) -> Callable[Concatenate[Operations, GivenP], ResultT]:
    """Make a change wait until the previous one is complete."""

    @wraps(change)
    def alone(operations: Operations, /, *given: GivenP.args, **named: GivenP.kwargs) -> ResultT:
        with operations._changing:  # noqa: SLF001 - a method of the class
            return change(operations, *given, **named)

    return alone


class Operations(Value):
    """The changes that an operator can make.

    Attributes:
        home: the coordinator's directory.
        store: its database.
        events: the event log.
        follow: `Coordinator.follow`.
        clock: unix time.
        stopping: set when the program ends; nothing more is created then.
        by: name of the identity that makes the changes, for the history of policies.
    """

    home: Home
    store: Store
    events: EventLog
    follow: Callable[..., None] = lambda federation, resume=False: None
    clock: Callable[[], float] = time.time
    stopping: threading.Event = field(default_factory=threading.Event)
    by: str = ""
    _changing: threading.RLock = field(default_factory=threading.RLock)

    @_one_at_a_time
    def start(self, federation: str) -> FederationRecord:
        """Start a federation that was created without starting it. Repeating it changes nothing.

        Raises:
            SteeringError: it is paused or has ended.
        """
        record = federation_of(self.store, federation)
        if record.status is FederationStatus.RUNNING:
            return record
        if record.status is not FederationStatus.CREATED:
            raise SteeringError(f"{federation} was already started; it is {record.status.value}")
        return self._change(record, FederationStatus.RUNNING)

    @_one_at_a_time
    def pause(self, federation: str, reason: str = "") -> FederationRecord:
        """Let the open attempt finish, and open no further one. Repeating it changes the reason if one is given.

        Raises:
            SteeringError: it is not running, or the reason is too long.
        """
        record, reason = federation_of(self.store, federation), bounded_reason(reason)
        if record.status is FederationStatus.PAUSED and not reason:
            return record
        self._require_life(record)
        return self._change(
            record, FederationStatus.PAUSED, reason or f"{NO_REASON}; `fedcg federation resume` resumes it"
        )

    @_one_at_a_time
    def resume(self, federation: str) -> FederationRecord:
        """Resume a federation that an operator paused or that stalled, or end the delay after a failed attempt; failed attempts are counted from 0 again.

        Raises:
            SteeringError: it is not running.
        """
        record = federation_of(self.store, federation)
        self._require_life(record)
        self.store.resume(federation)
        return self._change(record, FederationStatus.RUNNING, resume=True)

    @_one_at_a_time
    def stop(self, federation: str, reason: str = "") -> FederationRecord:
        """Stop a federation now. Its devices keep the last aggregate; an open attempt fails. Repeating it changes the reason if one is given.

        Raises:
            SteeringError: it was never started, it is finished, or the reason is too long.
        """
        record, reason = federation_of(self.store, federation), bounded_reason(reason)
        if record.status is not FederationStatus.STOPPED:
            self._require_life(record)
        elif not reason:
            return record
        return self._change(record, FederationStatus.STOPPED, reason or NO_REASON)

    @_one_at_a_time
    def archive(self, federation: str) -> FederationRecord:
        """Hide a federation that has ended or was never started from lists and page. Its data is kept; `extend` reopens it.

        Raises:
            SteeringError: it has not ended yet.
        """
        record = federation_of(self.store, federation)
        if record.status is not FederationStatus.CREATED and not self._is_over(record):
            raise SteeringError(f"{federation} has not ended; `fedcg federation stop {federation}` stops it")
        return self._change(record, FederationStatus.ARCHIVED, record.status_reason)

    @_one_at_a_time
    def change_policy(
        self, federation: str, changes: Mapping[str, Any], check: Callable[[RoundPolicy], None] = lambda policy: None
    ) -> FederationRecord:
        """Change fields of the policy if `check` accepts the present one. The open attempt continues under the new policy.

        Raises:
            SteeringError: fields or values are invalid (the message names all), there are fewer clients than the method's sums require, or
                the number of rounds of an ended federation would change.
        """
        record = federation_of(self.store, federation)
        check(record.policy)
        policy = self._changed(record, changes)
        if policy.rounds != record.policy.rounds and self._is_over(record):
            raise SteeringError(f"{federation} ended; `fedcg federation extend {federation} --rounds N` adds rounds")
        self._set_policy(record, policy, changes)
        return self._followed(federation)

    def _set_policy(self, record: FederationRecord, policy: RoundPolicy, changes: Collection[str]) -> None:
        """Store a policy, and write each changed field with its values before and after, as JSON, to the event log."""
        self.store.set_policy(record.id, policy)
        changed = sorted(changes)
        was, now = ([json.dumps(getattr(each, name)) for name in changed] for each in (record.policy, policy))
        self.events.write("policy_changed", federation=record.id, changed=changed, before=was, after=now, by=self.by)

    @_one_at_a_time
    def extend(self, federation: str, rounds: int) -> FederationRecord:
        """Add rounds to a federation. One that has ended or was stopped continues from its last aggregate.

        Raises:
            SteeringError: fewer than one round.
        """
        record = federation_of(self.store, federation)
        if rounds < 1:
            raise SteeringError(f"rounds = {rounds}: add at least 1")
        closed = self.store.aggregates(federation)[-1].round
        more = {"rounds": (closed if record.status.is_ended else record.policy.rounds) + rounds}
        self._set_policy(record, self._changed(record, more), more)
        if not record.status.is_ended:
            return self._followed(federation)
        self.store.resume(federation)  # it may have stalled before
        return self._change(record, FederationStatus.RUNNING, resume=True)

    @_one_at_a_time
    def forget(self, federation: str, devices: Collection[str]) -> FederationRecord:
        """Permanently exclude devices and recompute the model without them. Adds a round if the federation has ended or is in its last round.

        Raises:
            SteeringError: the method can't remove the influence of a device, or (NotFoundError) a device does not exist.
        """
        record = federation_of(self.store, federation)
        if not self._spec(record).is_exact:
            raise SteeringError(
                f"{federation} trains weights ({record.method}), so the influence of a device's data can't be removed. "
                "`fedcg device disable` or `revoke` keeps the device out of rounds; `fedcg federation create PLAN` starts again without it"
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
        """Stop inviting a device until it is enabled. It stays enrolled. Repeating it changes only the reason, if one is given.

        Raises:
            SteeringError: it is no longer a member, or (NotFoundError) never was.
        """
        return self._device(device, self.clock(), reason)

    @_one_at_a_time
    def enable(self, device: str) -> DeviceRecord:
        """Invite a disabled device again. Repeating it changes nothing.

        Raises:
            SteeringError: it is no longer a member, or (NotFoundError) never was.
        """
        return self._device(device, None, "")

    @_one_at_a_time
    def describe(self, device: str, changes: Mapping[str, Any]) -> DeviceRecord:
        """Change labels, site and note of a device in any state: the fields of `Description`. They never reach the device.

        Raises:
            SteeringError: fields are invalid (the message names all), it would have too many labels, or (NotFoundError) it never existed.
        """
        device_of(self.store, device)
        try:
            wanted = Description.model_validate(changes)
        except ValidationError as error:
            problems = (line.removeprefix("(file): ") for line in problems_of(Description, error))
            raise SteeringError(listed(f"description of {device}", problems)) from error
        before = set(self.store.register.labels(device)[device])
        kept = before if wanted.labels is None else set(wanted.labels)
        labels = (kept | set(wanted.add_labels)) - set(wanted.remove_labels)
        if len(labels) > MAX_LABELS:
            raise SteeringError(f"{device} would have {len(labels)} labels; remove some, at most {MAX_LABELS} remain")
        given = wanted.model_dump(include={"site", "note"}, exclude_none=True)
        texts = {name: log_text(text) for name, text in given.items()}
        if changed := [*(["labels"] if labels != before else []), *texts]:
            self.store.register.describe(device, labels, texts)
            self.events.write("device_described", client=device, changed=changed)
        return device_of(self.store, device)

    @_one_at_a_time
    def readmit(self, device: str) -> DeviceRecord:
        """Invite a device again that is left out of rounds after repeated failures; they no longer count.

        Raises:
            SteeringError: it is no longer a member, or (NotFoundError) never was.
        """
        self._require_member(device)
        self.store.readmit(device, self.clock())
        self._follow_all()
        return device_of(self.store, device)

    @_one_at_a_time
    def pin(self, federation: str, round_number: int, label: str | None) -> AggregateRecord:
        """Keep the version of a round, under a label such as "best"; None: it is deleted like others again. Repeating it is safe.

        Raises:
            SteeringError: the label is too long, the version is already deleted, or (NotFoundError) it never existed.
        """
        record = version_of(self.store, federation, round_number)
        if label is not None:
            label = log_text(label)
            if not 0 < len(label) <= MAX_PIN:
                raise SteeringError(f"the label has {len(label)} characters; write 1 to {MAX_PIN}")
            try:
                artifacts_of(self.home).local(record.artifact)
            except FileNotFoundError as error:
                raise SteeringError(f"round {round_number} of {federation} is already deleted") from error
        self.store.pin(federation, round_number, label)
        self.events.write("model_pinned", federation=federation, round=round_number, label=label or "")
        return replace(record, pinned=label)

    def create_federation(
        self, plan: FederationPlan, *, start: bool = True, continued_from: str | None = None
    ) -> FederationRecord:
        """Create a federation, and start it if `start` is set. Takes seconds: a process with torch creates the initial weights.

        Args:
            plan: the operator's plan.
            start: whether to start it; otherwise it is only created.
            continued_from: a federation whose aggregate provides the initial weights: its id for the last one, or ID@ROUND.

        Raises:
            PlanError: the name is taken, or the method or the networks reject the plan.
            NotFoundError: there is no federation or version `continued_from`.
            StoppingError: the coordinator is stopping.
        """
        if continued_from is not None:
            source_of(self.store, continued_from)
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
        """Complete a plan in a process that ends with this program."""
        return create_federation.in_a_process(request, self.stopping)

    def revoke_device(self, device: str, reason: str = "") -> Revoked:
        """Revoke a device: its certificates, keys and any open session. Repeating it repeats the failed steps.

        Raises:
            NotFoundError: no device has this id.
        """
        device_of(self.store, device)
        done = revoke(self.home, self.store, device, bounded_reason(reason), self.clock())
        how = {"certificates": done.certificates, "reloaded": done.broker_reloaded}
        self.events.write("device_revoked", client=device, reason=reason, **how)
        return done

    def create_enrolment_token(self, wanted: WantedToken) -> tuple[Token, TokenRecord]:
        """Create a one-time enrolment token.

        Raises:
            EnrolmentError: the enrolment listener is off, or the device can't be enrolled or replaced.
        """
        return self._create_tokens([wanted])[0]

    def create_enrolment_tokens(self, wanted: WantedToken) -> list[tuple[Token, TokenRecord]]:
        """Create a one-time enrolment token for each device of a range, or none if one of them can't be enrolled.

        Raises:
            EnrolmentError: the enrolment listener is off, it is not a range, or a device can't be enrolled or replaced.
        """
        return self._create_tokens([wanted.model_copy(update={"device": id_}) for id_ in ids_in(wanted.device or "")])

    def _create_tokens(self, wanted: Sequence[WantedToken]) -> list[tuple[Token, TokenRecord]]:
        made = create_tokens(self.home, self.store, self.clock(), wanted)
        for token, record in made:
            self.events.write("token_created", token=token.id, client=token.device or "", until=record.expires_at)
        return made

    def revoke_enrolment_token(self, token: str) -> TokenRecord:
        """Revoke an unused enrolment token.

        Raises:
            NotFoundError: no token has this id.
            EnrolmentError: it was already used.
        """
        revoked = revoke_token(self.store, token, self.clock())
        self.events.write("token_revoked", token=token)
        return revoked

    def _spec(self, record: FederationRecord) -> FederationSpec:
        return FederationSpec.parse(artifacts_of(self.home).get(record.spec))

    def _changed(self, record: FederationRecord, changes: Mapping[str, Any]) -> RoundPolicy:
        """The policy of a federation with changed values, checked like a plan, and against its present round."""
        fixed = FederationPlan.model_fields.keys() - RoundPolicy.model_fields.keys()
        why = "can't change after creation; `fedcg federation continue` creates a new one"
        problems = [f"{name}: {why}" for name in changes if name in fixed]
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
                f"rounds = {policy.rounds}: {record.id} is already in round {least}; stop it to end it earlier"
            )
        if problems:
            raise SteeringError(listed(f"policy of {record.id}", problems))
        return policy

    def _last_begun(self, federation: str) -> int:
        """The last open or closed round, 0 before the first one."""
        state = self.store.round_state(federation)
        return state.round - (state.phase not in (Phase.COLLECTING, Phase.DISTILLING, Phase.FINISHED))

    def _require_life(self, record: FederationRecord) -> None:
        if record.status is FederationStatus.CREATED:
            raise SteeringError(f"{record.id} has not been started; start it with `fedcg federation start {record.id}`")
        if record.status.is_ended:
            why = f" ({record.status_reason})" if record.status_reason else ""
            more = "`fedcg federation extend` adds rounds"
            raise SteeringError(f"{record.id} was {record.status.value}{why}; {more}")

        if self._is_over(record):
            more = f"`fedcg federation extend {record.id} --rounds N` adds rounds"
            raise SteeringError(f"{record.id} is finished: all its rounds are closed; {more}")

    def _is_over(self, record: FederationRecord) -> bool:
        return record.status.is_ended or self.store.round_state(record.id).phase is Phase.FINISHED

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
        known, reason = self._require_member(device), bounded_reason(reason)
        if (known.disabled_at is None) != (at is None) or (reason and reason != known.disabled_because):
            self.store.disable(device, known.disabled_at if at and known.disabled_at else at, reason)
            name = "device_enabled" if at is None else "device_disabled"
            self.events.write(name, client=device, reason=reason)
            self._follow_all()
        return device_of(self.store, device)

    def _require_member(self, device: str) -> DeviceRecord:
        known = device_of(self.store, device)
        if known.state is not DeviceState.ENROLLED:
            raise SteeringError(f"{device} is not enrolled; it is {known.state.value}")
        return known

    def _follow_all(self) -> None:
        for record in self.store.federations():
            self.follow(record.id)


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
    """Complete a plan to a spec, create the initial aggregate, and register both.

    This does not change the broker's lists; the caller calls `publish_access` if a broker is running.

    Args:
        home: the coordinator's directory.
        store: its database.
        plan: the operator's plan.
        start: whether to start it; otherwise `Operations.start` starts it later.
        continued_from: as for `Operations.create_federation`.
        complete: the process that completes the plan, if one is already running.
        registering: `changing_members`, held only during registration; None if the caller holds it.

    Raises:
        PlanError: a federation with this name exists, or the method or the networks reject the plan.
        StoreError: there is no federation `continued_from`.
    """
    _check_new(store, plan)
    config, first = home.config(), None
    if continued_from is not None:
        source = source_of(store, continued_from)
        first = (store.federation(source.federation).spec, source.artifact)
        for artifact in first:
            artifacts_of(home).local(artifact)  # the process that creates the new artifacts reads the directory
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


def source_of(store: Store, continued_from: str) -> AggregateRecord:
    """The aggregate that ID or ID@ROUND names.

    Raises:
        NotFoundError: there is none.
    """
    federation, _, number = continued_from.partition("@")
    if number and not (number.isascii() and number.isdigit() and len(number) < 10):
        raise NotFoundError(f"{continued_from[:80]!r} names no version; write FEDERATION@ROUND")
    record = federation_of(store, federation)
    return version_of(store, federation, int(number)) if number else store.aggregates(record.id)[-1]


def _check_new(store: Store, plan: FederationPlan) -> None:
    if plan.federation in [record.id for record in store.federations()]:
        raise PlanError(f"federation = {plan.federation}: already exists; choose another name", exit_code=EXISTS)


def bounded_reason(reason: str) -> str:
    """A reason, cleaned for tables and terminals.

    Raises:
        SteeringError: it is too long.
    """
    if len(reason) > MAX_REASON:
        raise SteeringError(f"the reason has {len(reason)} characters; write at most {MAX_REASON}")
    return log_text(reason)
