"""Queries over all devices or all rounds at once, for views: few columns, one statement each. Part of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, cast, func, select, type_coerce

from coordinator.storage import schema
from fedcg.wire.messages.messages import Outcome


@dataclass(frozen=True)
class Delivery:
    """An update of a device, as far as views show it; times are unix times, `report` is what the device reported."""

    round: int
    attempt: int
    client: str
    size: int
    outcome: str
    reason: str
    report: dict[str, Any]
    stored_at: float
    weight: int | None
    figures: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Of the personal model, as reported."""
        return self.report.get("accuracy")

    @property
    def alone(self) -> float | None:
        """Of the local-only baseline, as reported."""
        return self.report.get("shadow")


@dataclass(frozen=True)
class Validity:
    """From when until when the newest certificate of a device is valid."""

    issued_at: float
    expires_at: float


class Overview(schema.Queries):
    """Reads what views show of many devices and rounds."""

    def certificates(self) -> dict[str, Validity]:
        """The certificate of each device that ends last, of those that are not revoked."""
        table = schema.certificates
        query = select(table.c.device, table.c.issued_at, table.c.expires_at)
        with self._engine.connect() as connection:
            rows = connection.execute(query.where(table.c.revoked_at.is_(None)).order_by(table.c.expires_at)).all()
        return {device: Validity(issued_at, expires_at) for device, issued_at, expires_at in rows}

    def deliveries(self, federation: str, client: str | None = None, since_round: int = 0) -> list[Delivery]:
        """All ended updates of a federation, or those of one client, from a round on; oldest first."""
        table = schema.updates
        query = select(table).where(table.c.federation == federation, table.c.round >= since_round)
        if client is not None:
            query = query.where(table.c.client == client)
        return list(self._deliveries(query.order_by(table.c.round, table.c.attempt, table.c.client)))

    def last_deliveries(self, federation: str, outcome: Outcome | None = None) -> dict[str, Delivery]:
        """The last update of each client of a federation, of any outcome or of one."""
        table = schema.updates
        recent = select(table.c.client, func.max(table.c.stored_at).label("at")).where(table.c.federation == federation)
        if outcome is not None:
            recent = recent.where(table.c.outcome == outcome.value)
        newest = recent.group_by(table.c.client).subquery()
        query = select(table).join(newest, (table.c.client == newest.c.client) & (table.c.stored_at == newest.c.at))
        return {each.client: each for each in self._deliveries(query.where(table.c.federation == federation))}

    def means(self, federation: str) -> list[tuple[int, float | None, float | None]]:
        """By round, the mean of the accuracies that clients reported with accepted updates: personal, and alone."""
        table = schema.updates
        is_text = self._engine.dialect.name == "sqlite"
        report = type_coerce(table.c.report, JSON) if is_text else cast(table.c.report, JSON)
        personal, alone = (report[name].as_float() for name in ("accuracy", "shadow"))
        query = (
            select(table.c.round, func.avg(personal), func.avg(alone))
            .where(table.c.federation == federation, table.c.outcome == Outcome.ACCEPTED.value)
            .group_by(table.c.round)
            .order_by(table.c.round)
        )
        with self._engine.connect() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(query)]

    def volumes(self, federation: str) -> dict[str, tuple[int, int]]:
        """By client, how many updates it delivered and their bytes, whatever their outcome."""
        table = schema.updates
        query = select(table.c.client, func.count(), func.sum(table.c.size)).where(table.c.federation == federation)
        with self._engine.connect() as connection:
            return {row[0]: (row[1], int(row[2])) for row in connection.execute(query.group_by(table.c.client))}

    def merged(self, federation: str) -> dict[tuple[int, int], int]:
        """By round and attempt, how many updates were given a weight in the merge."""
        table = schema.updates
        query = select(table.c.round, table.c.attempt, func.count()).where(
            table.c.federation == federation, table.c.weight > 0, table.c.outcome == Outcome.ACCEPTED.value
        )
        with self._engine.connect() as connection:
            return {(row[0], row[1]): row[2] for row in connection.execute(query.group_by("round", "attempt"))}

    def answers(self, federation: str, client: str, limit: int = 50) -> list[tuple[int, int, str, str]]:
        """The last attempts that invited a client: round, attempt, its answer, its reason; newest first."""
        table = schema.participants
        columns = (table.c.round, table.c.attempt, table.c.state, table.c.reason)
        query = select(*columns).where(table.c.federation == federation, table.c.client == client)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(table.c.round.desc(), table.c.attempt.desc()).limit(limit)).all()
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    def counts(self, federation: str) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        """How many updates (and bytes) ended with each outcome, and how many attempts are in each state."""
        updates, attempts = schema.updates, schema.attempts
        ended = (
            select(updates.c.outcome, func.count(), func.sum(updates.c.size))
            .where(updates.c.federation == federation)
            .group_by(updates.c.outcome)
        )
        tried = (
            select(attempts.c.state, func.count()).where(attempts.c.federation == federation).group_by(attempts.c.state)
        )
        with self._engine.connect() as connection:
            outcomes = {row[0]: (row[1], int(row[2])) for row in connection.execute(ended)}
            states = {row[0]: row[1] for row in connection.execute(tried)}
        return outcomes, states

    def _deliveries(self, query: Any) -> Iterator[Delivery]:
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        for row in rows:
            yield Delivery(
                row["round"],
                row["attempt"],
                row["client"],
                row["size"],
                row["outcome"],
                row["reason"],
                json.loads(row["report"] or "{}"),
                row["stored_at"],
                row["weight"],
                json.loads(row["figures"] or "{}"),
            )
