"""Queries about presence: when each device came and went, and its last report of itself. Part of the store: same database, same rules."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, func, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from coordinator.rounds.records import ConditionRecord, PresenceRecord
from coordinator.storage import schema

KEEP_S = 90 * 86_400.0
"""Changes older than this are deleted, but never the last one of a device."""
KEEP_CHANGES = 2000
"""So many changes of a device in a federation are kept, however often it comes and goes: as many as a page draws."""


class Presence(schema.Queries):
    """The changes of presence in the coordinator's database, and the devices' reports of themselves."""

    def keep_condition(self, federation: str, device: str, at: float, content: str) -> None:
        """Replace a device's report of itself."""
        table = schema.conditions
        values = {"federation": federation, "device": device, "at": at, "content": content}
        with self._engine.begin() as connection:
            connection.execute(delete(table).where(table.c.federation == federation, table.c.device == device))
            connection.execute(insert(table).values(**values))

    def conditions(self, federation: str, device: str | None = None) -> list[ConditionRecord]:
        """The last reports of the devices of a federation, or of one, about themselves; sorted by device."""
        table = schema.conditions
        query = select(table).where(table.c.federation == federation).order_by(table.c.device)
        return self._all(ConditionRecord, query if device is None else query.where(table.c.device == device))

    def note(self, *changes: PresenceRecord) -> None:
        """Store changes, in one transaction; of two of a device within one tick of the clock the first one stays."""
        rows = [{**asdict(change), "reason": change.reason[:300]} for change in changes]
        try:
            self._write(*(insert(schema.presence).values(row) for row in rows))
        except IntegrityError:
            for change in changes if len(changes) > 1 else ():
                self.note(change)

    def changes(self, device: str, since: float, limit: int = KEEP_CHANGES) -> list[PresenceRecord]:
        """The last changes of a device after a time, oldest first."""
        table = schema.presence
        query = select(table).where(table.c.device == device, table.c.at >= since).order_by(table.c.at.desc())
        return self._all(PresenceRecord, query.limit(limit))[::-1]

    def before(self, device: str, at: float) -> list[PresenceRecord]:
        """The last change of a device before a time, in each federation."""
        table = schema.presence
        newest = select(func.max(table.c.at)).where(table.c.device == device, table.c.at < at)
        recent = select(table).where(table.c.device == device, table.c.at.in_(newest.group_by(table.c.federation)))
        return self._all(PresenceRecord, recent.order_by(table.c.at))

    def latest(self, federation: str) -> dict[str, PresenceRecord]:
        """The last change of every device in a federation."""
        table = schema.presence
        of_each = select(table.c.device, func.max(table.c.at).label("at")).group_by(table.c.device)
        newest = of_each.filter_by(federation=federation).subquery()
        query = select(table).join(newest, (table.c.device == newest.c.device) & (table.c.at == newest.c.at))
        found = self._all(PresenceRecord, query.where(table.c.federation == federation))
        return {change.device: change for change in found}

    def prune(self, federation: str, before: float, device: str | None = None) -> None:
        """Delete changes before a time, and all but the last `KEEP_CHANGES` of each device; its last change stays.

        Args:
            federation: its id.
            before: unix time.
            device: only the changes of this one.
        """
        table = schema.presence
        place = func.row_number().over(partition_by=table.c.device, order_by=table.c.at.desc())
        chosen = table.c.federation == federation
        if device is not None:
            chosen &= table.c.device == device
        ranked = select(table.c.device, table.c.at, place.label("place")).where(chosen).subquery()
        old = (ranked.c.place > 1) & ((ranked.c.at < before) | (ranked.c.place > KEEP_CHANGES))
        gone = select(ranked.c.device, ranked.c.at).where(old)
        self._write(delete(table).where(chosen, tuple_(table.c.device, table.c.at).in_(gone)))
