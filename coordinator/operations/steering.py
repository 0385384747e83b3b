"""What operators change: the life and the policy of federations, and which devices are invited.

Every change is one transaction in the database; a running coordinator follows it at once, one that starts later finds it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from coordinator.errors import NotFoundError, SteeringError, StoreError
from coordinator.operations.create_federation import too_few_for_sums
from coordinator.rounds.records import DeviceRecord, DeviceState, FederationRecord, FederationStatus
from coordinator.rounds.round_engine import Phase
from coordinator.storage.store import Store
from fedcg.config_file import listed, problems_of
from fedcg.event_log import EventLog, log_text
from fedcg.learning.spec import FederationPlan, FederationSpec, RoundPolicy

NO_REASON = "no reason given"
MAX_REASON = 300


class Follow(Protocol):
    """Brings a running coordinator's service of a federation to what the database holds."""

    def __call__(self, federation: str, *, resume: bool = False) -> None:
        """Do so; `resume` lets a federation go on that stalled."""


def nobody_follows(federation: str, *, resume: bool = False) -> None:
    """Do nothing: no coordinator runs, and one that starts later finds the change in the database."""


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


class Steering:
    """Changes federations and devices on behalf of an operator.

    Args:
        store: the database.
        spec: gives the spec of a federation.
        events: the event log.
        follow: of the running coordinator.
        clock: unix time.
    """

    def __init__(
        self,
        store: Store,
        spec: Callable[[FederationRecord], FederationSpec],
        events: EventLog,
        follow: Follow = nobody_follows,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._spec = spec
        self._events = events
        self._follow = follow
        self._clock = clock

    def start(self, federation: str) -> FederationRecord:
        """Start a federation that was created and not started. Repeating it changes nothing.

        Raises:
            SteeringError: it is paused or over.
        """
        record = federation_of(self._store, federation)
        if record.status is FederationStatus.RUNNING:
            return record
        if record.status is not FederationStatus.CREATED:
            raise SteeringError(f"{federation} was started already; it is {record.status.value}")
        return self._change(record, FederationStatus.RUNNING)

    def pause(self, federation: str, reason: str = "") -> FederationRecord:
        """Let the open attempt end as it would, and open no other one. Repeating it changes the reason, where one is given.

        Raises:
            SteeringError: it is not running, or the reason is too long.
        """
        record, reason = federation_of(self._store, federation), bounded_reason(reason)
        if record.status is FederationStatus.PAUSED and not reason:
            return record
        self._require_life(record)
        return self._change(
            record, FederationStatus.PAUSED, reason or f"{NO_REASON}; `fedcg federation resume` lets it go on"
        )

    def resume(self, federation: str) -> FederationRecord:
        """Let a federation go on that an operator paused, or that stalled; failed attempts are counted anew.

        Raises:
            SteeringError: it is not running.
        """
        record = federation_of(self._store, federation)
        self._require_life(record)
        self._store.resume(federation)
        return self._change(record, FederationStatus.RUNNING, resume=True)

    def stop(self, federation: str, reason: str = "") -> FederationRecord:
        """End a federation now: its devices keep the last aggregate; an open attempt fails. Repeating it changes the reason, where one is given.

        Raises:
            SteeringError: it was never started, or it is finished, or the reason is too long.
        """
        record, reason = federation_of(self._store, federation), bounded_reason(reason)
        if record.status is not FederationStatus.STOPPED:
            self._require_life(record)
        elif not reason:
            return record
        return self._change(record, FederationStatus.STOPPED, reason or NO_REASON)

    def archive(self, federation: str) -> FederationRecord:
        """Take a federation that is over, or was never started, off lists and page; its data stays, and `extend` brings it back.

        Raises:
            SteeringError: it is not over yet.
        """
        record = federation_of(self._store, federation)
        if (
            not (record.status.is_ended or self._is_finished(federation))
            and record.status is not FederationStatus.CREATED
        ):
            raise SteeringError(f"{federation} is not over; `fedcg federation stop {federation}` ends it")
        return self._change(record, FederationStatus.ARCHIVED, record.status_reason)

    def change_policy(self, federation: str, changes: Mapping[str, Any]) -> FederationRecord:
        """Change fields of the policy; the open attempt goes on by the new one.

        Raises:
            SteeringError: a field or a value that can't be; names all of them. Fewer clients than the method's sums take.
        """
        record = federation_of(self._store, federation)
        policy = self._changed(record, changes)
        self._store.set_policy(federation, policy)
        self._events.write("policy_changed", federation=federation, changed=sorted(changes))
        return self._followed(federation)

    def extend(self, federation: str, rounds: int) -> FederationRecord:
        """Add rounds to a federation, also to one that is over or was stopped: it goes on from its last aggregate.

        Raises:
            SteeringError: fewer than one, or it was never started.
        """
        record = federation_of(self._store, federation)
        if rounds < 1:
            raise SteeringError(f"rounds = {rounds}: add at least 1")
        if not record.status.is_ended:
            return self.change_policy(federation, {"rounds": record.policy.rounds + rounds})
        closed = self._store.aggregates(federation)[-1].round
        policy = self._changed(record, {"rounds": closed + rounds})
        self._store.set_policy(federation, policy)
        return self._change(record, FederationStatus.RUNNING)

    def disable(self, device: str, reason: str = "") -> DeviceRecord:
        """Invite a device no more until it is enabled; it stays enrolled. Repeating it changes nothing.

        Raises:
            SteeringError: it is no member any more, or (NotFoundError) never was.
        """
        return self._device(device, self._clock(), reason)

    def enable(self, device: str) -> DeviceRecord:
        """Invite a disabled device again. Repeating it changes nothing.

        Raises:
            SteeringError: it is no member any more, or (NotFoundError) never was.
        """
        return self._device(device, None, "")

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
        state = self._store.round_state(record.id)
        least = state.round if state.phase in (Phase.COLLECTING, Phase.DISTILLING, Phase.FINISHED) else state.round - 1
        if policy.rounds < least:
            problems.append(
                f"rounds = {policy.rounds}: {record.id} is in round {least} already; stop it to end it earlier"
            )
        if problems:
            raise SteeringError(listed(f"policy of {record.id}", problems))
        return policy

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
        return self._store.round_state(federation).phase is Phase.FINISHED

    def _change(
        self, record: FederationRecord, status: FederationStatus, reason: str = "", *, resume: bool = False
    ) -> FederationRecord:
        self._store.set_status(record.id, status, reason)
        self._events.write("steered", federation=record.id, status=status.value, reason=reason)
        return self._followed(record.id, resume=resume)

    def _followed(self, federation: str, *, resume: bool = False) -> FederationRecord:
        self._follow(federation, resume=resume)
        return self._store.federation(federation)

    def _device(self, device: str, at: float | None, reason: str) -> DeviceRecord:
        known, reason = device_of(self._store, device), bounded_reason(reason)
        if known.state is not DeviceState.ENROLLED:
            raise SteeringError(f"{device} is not enrolled; it is {known.state.value}")
        if (known.disabled_at is None) != (at is None):
            self._store.disable(device, at, reason)
            name = "device_enabled" if at is None else "device_disabled"
            self._events.write(name, client=device, reason=reason)
            for record in self._store.federations():
                self._follow(record.id)
        return device_of(self._store, device)


def bounded_reason(reason: str) -> str:
    """A reason as tables and terminals show it.

    Raises:
        SteeringError: it is too long.
    """
    if len(reason) > MAX_REASON:
        raise SteeringError(f"the reason has {len(reason)} characters; write at most {MAX_REASON}")
    return log_text(reason)
