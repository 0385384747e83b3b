"""Queries for views over many devices or rounds, in one statement each; presence of devices, and their last self-reports.

Part of the store, with the same rules.
"""

from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from coordinator.rounds.records import AttemptState, CertificateRecord, ConditionRecord, PresenceRecord, UpdateRecord
from coordinator.storage import schema
from fedcg.wire.messages.schemas import DeclineReason, Outcome

ANSWERS = 50  # answers of one device on a page


class Overview(schema.Queries):
    """Reads data for views over many devices and rounds."""

    def certificates(self) -> dict[str, CertificateRecord]:
        """Each device's unrevoked certificate that expires last."""
        query = sa.select(schema.certificates).filter_by(revoked_at=None).order_by(schema.certificates.c.expires_at)
        return {each.device: each for each in self._all(CertificateRecord, query)}

    def round_times(self, federation: str, since_round: int) -> dict[str, float]:
        """Seconds that all local steps of a round take each client, from its last prediction since a round."""
        table = schema.participants
        query = sa.select(table.c.client, table.c.predicted_s, table.c.share).filter_by(federation=federation)
        known = query.where(table.c.round >= since_round, table.c.predicted_s.is_not(None))
        rows = self._rows(known.order_by(table.c.round, table.c.attempt))
        return {client: predicted_s / share for client, predicted_s, share in rows}

    def deliveries(self, federation: str, client: str | None = None) -> list[UpdateRecord]:
        """All ended updates of a federation, or those of one client; oldest first."""
        table = schema.updates
        query = sa.select(table).filter_by(federation=federation)
        if client is not None:
            query = query.filter_by(client=client)
        return self._all(UpdateRecord, query.order_by(table.c.round, table.c.attempt, table.c.client))

    def audited(self, federation: str, since_round: int) -> list[UpdateRecord]:
        """The updates since a round whose reports have audit figures, oldest first."""
        table = schema.updates
        query = sa.select(table).where(table.c.round >= since_round, table.c.report.contains('"audit":{'))
        return self._all(UpdateRecord, query.filter_by(federation=federation).order_by(table.c.round, table.c.attempt))

    def withheld(self, federation: str, since_round: int) -> list[tuple[str, int, int]]:
        """Client, round and attempt of each update since a round that a device's own audit withheld."""
        table = schema.participants
        query = sa.select(table.c.client, table.c.round, table.c.attempt).where(table.c.round >= since_round)
        rows = self._rows(query.filter_by(federation=federation, reason=DeclineReason.WITHHELD.value))
        return [(client, number, attempt) for client, number, attempt in rows]

    def last_deliveries(
        self, federation: str, client: str | None = None, *, outcome: Outcome | None = None
    ) -> dict[str, UpdateRecord]:
        """The last update of each client, or of one client, with any outcome or a given one."""
        table = schema.updates
        recent = sa.select(table.c.client, sa.func.max(table.c.stored_at).label("at")).filter_by(federation=federation)
        if outcome is not None:
            recent = recent.filter_by(outcome=outcome.value)
        if client is not None:
            recent = recent.filter_by(client=client)
        newest = recent.group_by(table.c.client).subquery()
        is_newest = (table.c.client == newest.c.client) & (table.c.stored_at == newest.c.at)
        query = sa.select(table).join(newest, is_newest).where(table.c.federation == federation)
        return {each.client: each for each in self._all(UpdateRecord, query)}

    def means(self, federation: str, since_round: int = 0) -> list[tuple[int, float | None, float | None]]:
        """By closed round since a round, the mean reported accuracies of accepted updates: personal and local-only."""
        table = schema.updates
        means = [sa.func.avg(self._reported(name)) for name in ("accuracy", "shadow")]
        query = _of_closed_rounds(federation, table.c.round, *means).where(table.c.round >= since_round)
        rows = self._rows(query.group_by(table.c.round).order_by(table.c.round))
        return [(number, own, baseline) for number, own, baseline in rows]

    def gains(self, federation: str, since_round: int) -> dict[str, tuple[Any, ...]]:
        """By client, over its accepted updates to closed rounds.

        Returns:
            Number, mean and mean square of the gains over the local-only model since a round; bytes, seconds and joules of all rounds.
        """
        table = schema.updates
        gain = sa.case((table.c.round >= since_round, self._reported("accuracy") - self._reported("shadow")))
        spent = [
            sa.func.sum(each)
            for each in (table.c.size, *(self._reported("cost", name) for name in ("seconds", "joules")))
        ]
        query = _of_closed_rounds(
            federation, table.c.client, sa.func.count(gain), sa.func.avg(gain), sa.func.avg(gain * gain), *spent
        )
        return {client: tuple(values) for client, *values in self._rows(query.group_by(table.c.client))}

    def _reported(self, *names: str) -> sa.ColumnElement[float]:
        """A number in the reports of updates."""
        stored = schema.updates.c.report
        report = sa.type_coerce(stored, sa.JSON) if self._engine.dialect.name == "sqlite" else sa.cast(stored, sa.JSON)
        number: sa.ColumnElement[float] = report[names].as_float()
        return number

    def volumes(self, federation: str) -> dict[str, tuple[int, int]]:
        """By client, the number and bytes of delivered updates, with any outcome."""
        table = schema.updates
        query = sa.select(table.c.client, sa.func.count(), sa.func.sum(table.c.size)).filter_by(federation=federation)
        return {client: (count, int(size)) for client, count, size in self._rows(query.group_by(table.c.client))}

    def merged(self, federation: str) -> dict[tuple[int, int], int]:
        """By round and attempt, the number of updates with a weight in the merge."""
        table = schema.updates
        query = sa.select(table.c.round, table.c.attempt, sa.func.count()).where(table.c.weight > 0)
        merged = query.filter_by(federation=federation, outcome=Outcome.ACCEPTED.value).group_by("round", "attempt")
        return {(number, attempt): count for number, attempt, count in self._rows(merged)}

    def answers(self, federation: str, client: str) -> list[tuple[int, int, str, str]]:
        """The last attempts that invited a client: round, attempt, answer, reason; newest first."""
        table = schema.participants
        columns = (table.c.round, table.c.attempt, table.c.state, table.c.reason)
        query = sa.select(*columns).filter_by(federation=federation, client=client)
        newest_first = query.order_by(table.c.round.desc(), table.c.attempt.desc())
        return [(row[0], row[1], row[2], row[3]) for row in self._rows(newest_first.limit(ANSWERS))]

    def counts(self, federation: str) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        """Counts over ended attempts: updates (and bytes) by outcome, and attempts by state.

        Open attempts are excluded, since their counts may change and counters must never decrease.
        """
        updates, attempts = schema.updates, schema.attempts
        is_over = attempts.c.state.in_((_CLOSED, _FAILED)) & (attempts.c.federation == federation)
        ended = sa.select(updates.c.outcome, sa.func.count(), sa.func.sum(updates.c.size)).group_by(updates.c.outcome)
        tried = sa.select(attempts.c.state, sa.func.count()).group_by(attempts.c.state)
        outcomes = self._rows(ended.join(attempts, _same_attempt(updates, attempts)).where(is_over))
        states = self._rows(tried.where(is_over))
        return {outcome: (count, int(size)) for outcome, count, size in outcomes}, dict(states)


def _of_closed_rounds(federation: str, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """A query over the accepted updates to closed rounds."""
    table, attempts = schema.updates, schema.attempts
    query = sa.select(*columns).join(attempts, _same_attempt(table, attempts) & (attempts.c.state == _CLOSED))
    return query.where(table.c.federation == federation, table.c.outcome == Outcome.ACCEPTED.value)


def _same_attempt(one: sa.Table, other: sa.Table) -> sa.ColumnElement[bool]:
    """Whether rows of two tables belong to the same attempt."""
    return sa.and_(*(one.c[name] == other.c[name] for name in ("federation", "round", "attempt")))


_CLOSED, _FAILED = AttemptState.CLOSED.value, AttemptState.FAILED.value
KEEP_S = 90 * 86_400.0
"""Age at which changes are deleted, except a device's last one."""
KEEP_CHANGES = 2000
"""Most changes kept per device and federation: as many as a page draws."""


class Presence(schema.Queries):
    """Presence changes and the devices' self-reports in the coordinator's database."""

    def keep_condition(self, federation: str, device: str, at: float, content: str) -> None:
        """Replace a device's self-report."""
        table = schema.conditions
        values = {"federation": federation, "device": device, "at": at, "content": content}
        self._write(sa.delete(table).filter_by(federation=federation, device=device), sa.insert(table).values(**values))

    def conditions(self, federation: str, device: str | None = None) -> list[ConditionRecord]:
        """The last self-reports of a federation's devices, or of one device; sorted by device."""
        table = schema.conditions
        query = sa.select(table).where(table.c.federation == federation).order_by(table.c.device)
        return self._all(ConditionRecord, query if device is None else query.where(table.c.device == device))

    def note(self, *changes: PresenceRecord) -> None:
        """Store changes in one transaction; of two changes of a device at the same time, the first one stays."""
        rows = [{**asdict(change), "reason": change.reason[:300]} for change in changes]
        try:
            self._write(*(sa.insert(schema.presence).values(row) for row in rows))
        except IntegrityError:
            for change in changes if len(changes) > 1 else ():
                self.note(change)

    def changes(self, device: str, since: float, limit: int = KEEP_CHANGES) -> list[PresenceRecord]:
        """A device's last changes since a time, oldest first."""
        table = schema.presence
        query = sa.select(table).where(table.c.device == device, table.c.at >= since).order_by(table.c.at.desc())
        return self._all(PresenceRecord, query.limit(limit))[::-1]

    def before(self, device: str, at: float) -> list[PresenceRecord]:
        """A device's last change before a time, in each federation."""
        table = schema.presence
        newest = sa.select(sa.func.max(table.c.at)).where(table.c.device == device, table.c.at < at)
        recent = sa.select(table).where(table.c.device == device, table.c.at.in_(newest.group_by(table.c.federation)))
        return self._all(PresenceRecord, recent.order_by(table.c.at))

    def latest(self, federation: str) -> dict[str, PresenceRecord]:
        """The last change of every device in a federation."""
        table = schema.presence
        of_each = sa.select(table.c.device, sa.func.max(table.c.at).label("at")).group_by(table.c.device)
        newest = of_each.filter_by(federation=federation).subquery()
        query = sa.select(table).join(newest, (table.c.device == newest.c.device) & (table.c.at == newest.c.at))
        found = self._all(PresenceRecord, query.where(table.c.federation == federation))
        return {change.device: change for change in found}

    def prune(self, federation: str, before: float, device: str | None = None) -> None:
        """Delete changes before a time, and all except the last `KEEP_CHANGES` per device; its last change stays.

        Args:
            federation: its id.
            before: unix time.
            device: only changes of this device.
        """
        table = schema.presence
        place = sa.func.row_number().over(partition_by=table.c.device, order_by=table.c.at.desc())
        chosen = table.c.federation == federation
        if device is not None:
            chosen &= table.c.device == device
        ranked = sa.select(table.c.device, table.c.at, place.label("place")).where(chosen).subquery()
        old = (ranked.c.place > 1) & ((ranked.c.at < before) | (ranked.c.place > KEEP_CHANGES))
        gone = sa.select(ranked.c.device, ranked.c.at).where(old)
        self._write(sa.delete(table).where(chosen, sa.tuple_(table.c.device, table.c.at).in_(gone)))
