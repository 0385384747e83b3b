"""All queries of the coordinator. Synchronous and thread-safe; call them from a thread, not from an event loop.

Changes that belong together are one transaction. A method returns only after its commit is on disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import URL, Insert, Table, Update, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from coordinator.errors import EnrolmentError, PlanError, StoreError
from coordinator.paths import Home
from coordinator.rounds.engine import Phase, RoundState, transition
from coordinator.rounds.records import (
    AggregateRecord,
    AttemptRecord,
    AttemptState,
    CertificateRecord,
    DeviceRecord,
    DeviceState,
    FederationRecord,
    FederationStatus,
    ParticipantRecord,
    ParticipantState,
    UpdateRecord,
)
from coordinator.rounds.signals import Paused
from coordinator.storage import schema
from coordinator.storage.database import HighWater, checkpoint, database_of, open_database, unusable
from coordinator.storage.event_store import Events
from coordinator.storage.member_store import ApiStore, MemberStore
from coordinator.storage.view_store import Overview, Presence
from fedcg.errors import EXISTS
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import KeyLink, Outcome, RoundAttempt


class SumRecords(schema.Queries):
    """One record per federation, for the last attempt with a sum."""

    def keep(self, federation: str, at: RoundAttempt, content: str) -> None:
        """Replace the federation's record."""
        table = schema.sealed_sums
        values = {**_is(federation, at), "content": content}
        self._write(delete(table).where(table.c.federation == federation), insert(table).values(**values))

    def of(self, federation: str, at: RoundAttempt) -> str | None:
        """The record of that attempt, if it is the last one."""
        query = select(schema.sealed_sums).filter_by(**_is(federation, at))
        return next((str(row.content) for row in self._rows(query)), None)


MAX_EPOCH_STEP = 64
_COLLECTING = AttemptState.COLLECTING.value


class Store(schema.Queries):
    """The coordinator's database.

    Attributes:
        register: tokens, certificates and memberships.
        presence: when devices came online and went offline.
        overview: views of many devices and rounds.
        api: tokens of the operators' API, and the idempotency keys of its requests.
        sealed_sums: sums of the open attempts.
        events: the latest events, with their sentences.
    """

    def __init__(self, database: Path | URL, home: Home | None = None) -> None:
        engine = open_database(database)
        self._mark = None if home is None else HighWater(home, engine)
        super().__init__(engine, *(() if self._mark is None else (self._mark.lift,)))
        self.register = MemberStore(self._engine, self._committed)
        self.presence = Presence(self._engine)
        self.overview = Overview(self._engine)
        self.api = ApiStore(self._engine, self._committed)
        self.sealed_sums = SumRecords(self._engine)
        self.events = Events(self._engine)

    @classmethod
    def of(cls, home: Home, *, accepts_loss: bool = False) -> Store:
        """Open the database in a home's configuration, and check that it has lost no commits.

        Args:
            home: the coordinator's.
            accepts_loss: accept it as it is and continue from there.

        Raises:
            StoreError: the database can't be used, or commits are lost.
        """
        database = database_of(home)
        store = cls(database, home)
        assert store._mark is not None
        try:
            (store._mark.accept_loss if accepts_loss else store._mark.check)()
        except DBAPIError as error:
            store.close()
            raise unusable(database, error) from error
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections."""
        self.events.flush()
        self._engine.dispose()

    def next_epoch(self) -> int:
        """Take the lease: a number above all earlier ones by a random step, so that two copies of one database hardly ever take the same number.

        The steps are far below the milliseconds between two starts, so a restored coordinator's epoch, the time, is above them.
        """
        step = 1 + secrets.randbelow(MAX_EPOCH_STEP)
        with self._counted() as connection:
            if connection.execute(update(schema.leases).values(epoch=schema.leases.c.epoch + step)).rowcount == 0:
                connection.execute(insert(schema.leases).values(id=1, epoch=1 + step))
            return int(connection.execute(select(schema.leases.c.epoch)).scalar_one())

    def epoch(self) -> int:
        """The last lease number; 0 before the first start."""
        with self._engine.connect() as connection:
            return connection.execute(select(schema.leases.c.epoch)).scalar_one_or_none() or 0

    def add_device(
        self, device: str, public_key: str, now: float, certificate: CertificateRecord | None = None
    ) -> None:
        """Enrol a device with its certificate.

        Raises:
            EnrolmentError: the id is in use.
        """
        values = {"id": device, "public_key": public_key, "enrolled_at": now}
        issued = [] if certificate is None else [insert(schema.certificates).values(**asdict(certificate))]
        try:
            self._write(insert(schema.devices).values(**values), *issued)
        except IntegrityError as error:
            raise EnrolmentError(f"device {device!r} already exists; choose another id") from error

    def devices(self) -> list[DeviceRecord]:
        """All devices ever enrolled, sorted by id."""
        return sorted(self._all(DeviceRecord, select(schema.devices)), key=attrgetter("id"))

    def members(self) -> list[DeviceRecord]:
        """The devices that may participate, sorted by id."""
        return [device for device in self.devices() if device.state is DeviceState.ENROLLED]

    def agents(self) -> list[str]:
        """The agent versions of the devices that may participate."""
        query = select(schema.devices.c.agent).distinct().where(schema.devices.c.agent.is_not(None))
        return [row.agent for row in self._rows(query.filter_by(state=DeviceState.ENROLLED.value))]

    def device(self, device: str) -> DeviceRecord | None:
        """One device, in any state."""
        return self._one(DeviceRecord, select(schema.devices).filter_by(id=device))

    def saw_device(self, device: str, at: float, agent: str | None = None) -> None:
        """Store when a device was last seen, and its agent's version if given."""
        version = {} if agent is None else {"agent": agent}
        self._write(update(schema.devices).filter_by(id=device).values(last_seen_at=at, **version))

    def disable(self, device: str, at: float | None, reason: str) -> None:
        """Disable an enrolled device since a time, or (None) enable it; devices whose membership ended do not change."""
        disabled = update(schema.devices).values(disabled_at=at, disabled_because=reason[:300])
        self._write(disabled.filter_by(id=device, state=DeviceState.ENROLLED.value))

    def readmit(self, device: str, at: float) -> None:
        """Store that a device's failures before a time no longer leave it out of rounds."""
        self._write(update(schema.devices).filter_by(id=device).values(readmitted_at=at))

    # Federations

    def add_federation(
        self, federation: FederationRecord, initial: AggregateRecord, links: Collection[KeyLink] = (), now: float = 0.0
    ) -> None:
        """Create a federation with its initial aggregate and the history of the coordinator's message key.

        Raises:
            PlanError: the id is in use.
        """
        values = {**asdict(federation), "policy": federation.policy.model_dump_json()}
        try:
            self._write(
                insert(schema.federations).values(values),
                insert(schema.aggregates).values(**asdict(initial)),
                *(_added_link(federation.id, link, now) for link in links),
            )
        except IntegrityError as error:
            raise PlanError(f"federation {federation.id!r} already exists", exit_code=EXISTS) from error

    def federations(self) -> list[FederationRecord]:
        """All federations, oldest first."""
        return self._all(FederationRecord, select(schema.federations).order_by(schema.federations.c.created_at))

    def shown_federations(self) -> list[FederationRecord]:
        """Federations that are not archived, oldest first: shown in lists, and the default of commands."""
        return [record for record in self.federations() if record.status is not FederationStatus.ARCHIVED]

    def federation(self, federation: str) -> FederationRecord:
        """One federation.

        Raises:
            StoreError: there is none with this id.
        """
        known = self._one(FederationRecord, select(schema.federations).filter_by(id=federation))
        if known is None:
            raise StoreError(f"there is no federation {federation!r}")
        return known

    def resume(self, federation: str) -> None:
        """Resume a paused or stalled federation and restart its count of failed attempts."""
        last = self.last_attempt(federation)
        if last is not None and last.state is AttemptState.FAILED:
            self._write(_change_federation(federation, first_attempt=last.attempt + 1))

    def set_status(self, federation: str, status: FederationStatus, reason: str) -> None:
        """Store the operator's setting for a federation, and the reason."""
        self._write(_change_federation(federation, status=status.value, status_reason=reason[:300]))

    def set_policy(self, federation: str, policy: RoundPolicy) -> None:
        """Store a federation's policy."""
        self._write(_change_federation(federation, policy=policy.model_dump_json()))

    def forget(self, federation: str, devices: Collection[str]) -> None:
        """Store the devices that no longer participate in a federation."""
        self._write(_change_federation(federation, forgotten=" ".join(sorted(devices))))

    def key_links(self, federation: str) -> tuple[KeyLink, ...]:
        """The history of the coordinator's message key, oldest first."""
        table = schema.key_links
        columns = (table.c[name] for name in KeyLink.model_fields)
        query = select(*columns).filter_by(federation=federation).order_by(table.c.serial)
        return tuple(self._all(KeyLink, query))

    def add_key_links(self, links: Mapping[str, KeyLink], now: float) -> None:
        """Store a link of each federation; their key is valid from now on."""
        self._write(*(_added_link(federation, link, now) for federation, link in links.items()))

    # Attempts

    def open_attempt(
        self,
        federation: str,
        at: RoundAttempt,
        base: str,
        clients: frozenset[str],
        opened_at: float,
        deadline_at: float,
        shares: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Store an attempt that starts collecting, and its invited clients with their shares of the local steps (default 1)."""
        attempt = AttemptRecord(federation, at.round, at.attempt, AttemptState.COLLECTING, base, opened_at, deadline_at)
        of_each = {**_is(federation, at), "state": ParticipantState.INVITED.value}
        invited = [{**of_each, "client": client, "share": shares.get(client, 1.0)} for client in sorted(clients)]
        self._write(insert(schema.attempts).values(**asdict(attempt)), insert(schema.participants).values(invited))

    def move_deadline(self, federation: str, at: RoundAttempt, deadline_at: float) -> None:
        """Change the deadline of an attempt."""
        self._write(_change_attempt(federation, at, deadline_at=deadline_at))

    def start_distilling(self, federation: str, at: RoundAttempt, now: float) -> list[UpdateRecord]:
        """Stop accepting updates; return the accepted ones, sorted by client."""
        self._write(_change_attempt(federation, at, state=AttemptState.DISTILLING.value, distilling_at=now))
        return list(self.accepted(federation, at).values())

    def weigh(
        self,
        federation: str,
        at: RoundAttempt,
        weights: Mapping[str, int],
        figures: Mapping[str, str] = MappingProxyType({}),
        reasons: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Store the merge weights of clients' updates (0: not merged), their figures as JSON, and why some are odd."""
        judged = {
            client: {"weight": weight, "figures": figures.get(client), "reason": reasons.get(client, "")}
            for client, weight in weights.items()
        }
        self._write(*(_change(schema.updates, federation, at, client, **values) for client, values in judged.items()))

    def fail_attempt(
        self, federation: str, at: RoundAttempt, reason: str, now: float, first_attempt: int | None = None
    ) -> None:
        """End the attempt without an aggregate; if `first_attempt` is given, failed attempts count from there."""
        failed = _change_attempt(federation, at, state=AttemptState.FAILED.value, reason=reason[:300], closed_at=now)
        moved = [] if first_attempt is None else [_change_federation(federation, first_attempt=first_attempt)]
        self._write(failed, *moved)

    def close_attempt(self, aggregate: AggregateRecord, reason: str = "") -> None:
        """Store aggregate and server state and close the attempt in one transaction; `reason`: anything unusual about the merge.

        Raises:
            StoreError: the round already has an aggregate.
        """
        federation, at = aggregate.federation, RoundAttempt(aggregate.round, aggregate.attempt)
        now, state = aggregate.stored_at, AttemptState.CLOSED.value
        closed = _change_attempt(federation, at, state=state, closed_at=now, reason=reason)
        stored = insert(schema.aggregates).values(**asdict(aggregate))
        try:
            self._write(stored, closed, _change_federation(federation, first_attempt=1))
        except IntegrityError as error:
            raise StoreError(f"round {aggregate.round} already has an aggregate") from error
        checkpoint(self._engine)

    def attempts(self, federation: str) -> list[AttemptRecord]:
        """All attempts of a federation, oldest first."""
        table = schema.attempts
        query = select(table).filter_by(federation=federation).order_by(table.c.round, table.c.attempt)
        return self._all(AttemptRecord, query)

    def attempt(self, federation: str, at: RoundAttempt) -> AttemptRecord | None:
        """One attempt."""
        return self._one(AttemptRecord, select(schema.attempts).filter_by(**_is(federation, at)))

    def last_attempt(self, federation: str) -> AttemptRecord | None:
        """The latest attempt of a federation."""
        table = schema.attempts
        query = select(table).filter_by(federation=federation)
        return self._one(AttemptRecord, query.order_by(table.c.round.desc(), table.c.attempt.desc()).limit(1))

    # Participants and updates

    def participants(self, federation: str, at: RoundAttempt) -> list[ParticipantRecord]:
        """The invited clients of an attempt, sorted by id."""
        table = schema.participants
        query = select(*(table.c[each.name] for each in fields(ParticipantRecord))).filter_by(**_is(federation, at))
        return sorted(self._all(ParticipantRecord, query), key=attrgetter("client"))

    def answer(
        self,
        federation: str,
        at: RoundAttempt,
        client: str,
        state: ParticipantState,
        reason: str = "",
        *,
        answered_at: float | None = None,
        predicted_s: float | None = None,
    ) -> None:
        """Store the answer of an invited client, and when it came. A client that declined or was rejected stays declined."""
        reason = reason.replace("\0", "")  # the text is from a device, and PostgreSQL can't store this character
        times = {"accepted_at": answered_at, "predicted_s": predicted_s} if answered_at is not None else {}
        if state is ParticipantState.DECLINED:
            times = {"declined_at": answered_at}
        change = _change(schema.participants, federation, at, client, state=state.value, reason=reason, **times)
        if state is ParticipantState.ACCEPTED:
            change = change.where(schema.participants.c.state != ParticipantState.DECLINED.value)
        self._write(change)

    def started_training(self, federation: str, at: RoundAttempt, client: str, now: float) -> None:
        """Store when a client's first progress report to an attempt arrived; a later one changes nothing."""
        change = _change(schema.participants, federation, at, client, training_at=now)
        self._write(change.where(schema.participants.c.training_at.is_(None)))

    def end_update(self, record: UpdateRecord) -> UpdateRecord | None:
        """Store how an update ended, if its attempt is still collecting. A rejected update makes its client a declined participant.

        Returns:
            The stored record: `record`, or the earlier one of the same client and attempt; None if the attempt no longer accepts
            updates.
        """
        federation, at = record.federation, record.at
        try:
            with self._engine.connect() as connection, connection.begin() as transaction:
                # From here on, no other transaction writes in SQLite, or in PostgreSQL to the attempt's row.
                connection.execute(insert(schema.updates).values(**asdict(record)))
                collects = select(schema.attempts.c.state).filter_by(**_is(federation, at)).with_for_update()
                if connection.execute(collects).scalar_one() != _COLLECTING:
                    transaction.rollback()
                    return None
                if record.outcome is Outcome.REJECTED:
                    connection.execute(_declined(federation, at, record.client, record.reason))
        except IntegrityError:
            earlier = self.update(federation, at, record.client)
            if earlier is None:
                raise
            return earlier
        return record

    def reject_update(self, federation: str, at: RoundAttempt, client: str, reason: str) -> None:
        """Reject an accepted update that can't be merged, as if it had been rejected at once."""
        rejected = _change(
            schema.updates, federation, at, client, outcome=Outcome.REJECTED.value, reason=reason, weight=None
        )
        self._write(rejected, _declined(federation, at, client, reason))

    def update(self, federation: str, at: RoundAttempt, client: str) -> UpdateRecord | None:
        """How a client's update to an attempt ended; None if it has not ended."""
        return self._one(UpdateRecord, select(schema.updates).filter_by(**_is(federation, at), client=client))

    def updates(self, federation: str, at: RoundAttempt) -> list[UpdateRecord]:
        """All ended updates of an attempt, sorted by client."""
        query = select(schema.updates).filter_by(**_is(federation, at))
        return sorted(self._all(UpdateRecord, query), key=attrgetter("client"))

    def accepted(self, federation: str, at: RoundAttempt) -> dict[str, UpdateRecord]:
        """The accepted updates of an attempt by client, sorted."""
        return {each.client: each for each in self.updates(federation, at) if each.outcome is Outcome.ACCEPTED}

    # Aggregates

    def aggregate(self, federation: str, round_number: int) -> AggregateRecord | None:
        """The aggregate of a round; round 0 has the initial one."""
        return self._one(
            AggregateRecord, select(schema.aggregates).filter_by(federation=federation, round=round_number)
        )

    def aggregates(self, federation: str) -> list[AggregateRecord]:
        """All aggregates of a federation, oldest first."""
        query = select(schema.aggregates).filter_by(federation=federation)
        return self._all(AggregateRecord, query.order_by(schema.aggregates.c.round))

    def pin(self, federation: str, round_number: int, label: str | None) -> None:
        """Set or remove the label of an aggregate that is kept."""
        table = schema.aggregates
        self._write(update(table).filter_by(federation=federation, round=round_number).values(pinned=label))

    def pinned(self) -> set[str]:
        """The artifacts of all pinned aggregates."""
        table = schema.aggregates
        return {artifact for (artifact,) in self._rows(select(table.c.artifact).where(table.c.pinned.is_not(None)))}

    def artifacts_of_rounds(self, federation: str, first: int, end: int | None) -> set[str]:
        """Ids of the artifacts that rounds from `first` to before `end` stored or start from.

        A round starts from the previous aggregate, so that aggregate and its server state belong to both rounds.
        """
        updates, aggregates = schema.updates, schema.aggregates
        sent = select(updates.c.artifact).where(updates.c.round >= first)
        merged = select(aggregates.c.artifact, aggregates.c.server_state).where(aggregates.c.round >= first - 1)
        if end is not None:
            sent, merged = sent.where(updates.c.round < end), merged.where(aggregates.c.round < end)
        rows = [
            row for query in (sent, merged) for row in self._all(dict[str, str], query.filter_by(federation=federation))
        ]
        return {artifact for row in rows for artifact in row.values()}

    # The round engine

    def round_state(self, federation: str) -> RoundState:
        """The rebuilt state of the round engine, with no client online."""
        record = self.federation(federation)
        state = self._rebuilt(record)
        is_paused = record.status is FederationStatus.PAUSED
        return transition(state, Paused(record.status_reason), 0.0)[0] if is_paused else state

    def _rebuilt(self, record: FederationRecord) -> RoundState:
        federation = record.id
        last = self.last_attempt(federation)
        policy = record.policy
        state = RoundState(policy, first_attempt=record.first_attempt)
        if last is None:
            return state
        if last.state is AttemptState.CLOSED:
            if last.round >= policy.rounds:
                return RoundState(policy, Phase.FINISHED, last.round, last.attempt)
            return RoundState(policy, round=last.round + 1)
        if last.state is AttemptState.FAILED:
            return record.after_failure(last)
        people = self.participants(federation, last.at)
        by_state = {
            each: frozenset(person.client for person in people if person.state is each) for each in ParticipantState
        }
        return RoundState(
            policy,
            Phase.COLLECTING if last.state is AttemptState.COLLECTING else Phase.DISTILLING,
            last.round,
            last.attempt,
            participants=frozenset(person.client for person in people),
            updates=frozenset(self.accepted(federation, last.at)),
            declined=by_state[ParticipantState.DECLINED],
            deadline_at=last.deadline_at,
            first_attempt=record.first_attempt,
            accepted=by_state[ParticipantState.ACCEPTED],
            unapproved=frozenset(one.client for one in people if one.state is ParticipantState.INVITED and one.reason),
        )


def _added_link(federation: str, link: KeyLink, now: float) -> Insert:
    return insert(schema.key_links).values(federation=federation, made_at=now, **link.model_dump())


def _is(federation: str, at: RoundAttempt) -> dict[str, Any]:
    return {"federation": federation, **vars(at)}


def _change_federation(federation: str, **values: object) -> Update:
    return update(schema.federations).filter_by(id=federation).values(**values)


def _change_attempt(federation: str, at: RoundAttempt, **values: object) -> Update:
    return update(schema.attempts).filter_by(**_is(federation, at)).values(**values)


def _change(table: Table, federation: str, at: RoundAttempt, client: str, **values: object) -> Update:
    """Changes a client's row in `participants` or `updates`."""
    return update(table).filter_by(**_is(federation, at), client=client).values(**values)


def _declined(federation: str, at: RoundAttempt, client: str, reason: str) -> Update:
    return _change(schema.participants, federation, at, client, state=ParticipantState.DECLINED.value, reason=reason)
