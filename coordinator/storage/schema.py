"""Tables of the coordinator's database, and reading rows as records. Queries live in `store` and its parts.

Every table is keyed by federation but those of devices, certificates, tokens, repeated requests and the lease. After the
first release a change here comes with a revision in `migrations/versions`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Delete,
    Engine,
    Float,
    ForeignKey,
    Insert,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Update,
)

RecordT = TypeVar("RecordT")

metadata = MetaData()
_Count = Integer().with_variant(BigInteger, "postgresql")  # SQLite's INTEGER has 64 bits

leases = Table(
    "leases",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("epoch", _Count, nullable=False),
)
devices = Table(
    "devices",
    metadata,
    Column("id", String, primary_key=True),
    Column("public_key", String, nullable=False),
    Column("enrolled_at", Float, nullable=False),
    Column("last_seen_at", Float),
    Column("agent", String),
    Column("state", String, nullable=False, server_default="enrolled"),
    Column("ended_at", Float),
    Column("ended_because", String, nullable=False, server_default=""),
    Column("disabled_at", Float),
    Column("disabled_because", String, nullable=False, server_default=""),
)
certificates = Table(
    "certificates",
    metadata,
    Column("serial", String, primary_key=True),
    Column("device", ForeignKey("devices.id"), nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("pem", String, nullable=False),
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", String, primary_key=True),
    Column("secret_hash", String, nullable=False),
    Column("device", String),
    Column("replaces", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("used_at", Float),
    Column("used_by", String),
    Column("used_for", String),
    Column("serial", String),
    Column("federation", String),
)
federations = Table(
    "federations",
    metadata,
    Column("id", String, primary_key=True),
    Column("method", String, nullable=False),
    Column("spec", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("first_attempt", _Count, nullable=False, default=1),
    Column("status", String, nullable=False, server_default="running"),
    Column("status_reason", String, nullable=False, server_default=""),
    Column("continued_from", String),
)
key_links = Table(
    "key_links",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("serial", _Count, primary_key=True),
    Column("epoch", _Count, nullable=False),
    Column("old", String, nullable=False),
    Column("new", String, nullable=False),
    Column("signature", String, nullable=False),
    Column("made_at", Float, nullable=False),
)
attempts = Table(
    "attempts",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", _Count, primary_key=True),
    Column("attempt", _Count, primary_key=True),
    Column("state", String, nullable=False),
    Column("base", String, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("deadline_at", Float, nullable=False),
    Column("distilling_at", Float),
    Column("aggregate_stored_at", Float),
    Column("closed_at", Float),
    Column("reason", String, nullable=False, default=""),
)
participants = Table(
    "participants",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", _Count, primary_key=True),
    Column("attempt", _Count, primary_key=True),
    Column("client", ForeignKey("devices.id"), primary_key=True),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False, default=""),
    Column("share", Float, nullable=False, server_default="1"),
    Column("accepted_at", Float),
    Column("predicted_s", Float),
)
updates = Table(
    "updates",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", _Count, primary_key=True),
    Column("attempt", _Count, primary_key=True),
    Column("client", ForeignKey("devices.id"), primary_key=True),
    Column("artifact", String, nullable=False),
    Column("size", _Count, nullable=False),
    Column("outcome", String, nullable=False),
    Column("reason", String, nullable=False, default=""),
    Column("report", String),
    Column("manifest_at", Float, nullable=False),
    Column("stored_at", Float, nullable=False),
    Column("distances", String),
    Column("weight", _Count),
    Column("figures", String),
    Column("facts", String),
)
aggregates = Table(
    "aggregates",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", _Count, primary_key=True),
    Column("attempt", _Count, nullable=False),
    Column("artifact", String, nullable=False),
    Column("size", _Count, nullable=False),
    Column("server_state", String, nullable=False),
    Column("stored_at", Float, nullable=False),
)
presence = Table(
    "presence",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("device", ForeignKey("devices.id"), primary_key=True),
    Column("at", Float, primary_key=True),
    Column("online", Boolean, nullable=False),
    Column("reason", String, nullable=False, server_default=""),
)
conditions = Table(
    "conditions",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("device", ForeignKey("devices.id"), primary_key=True),
    Column("at", Float, nullable=False),
    Column("content", String, nullable=False),
)
masked_sums = Table(
    "masked_sums",
    metadata,
    Column("federation", ForeignKey("federations.id"), primary_key=True),
    Column("round", _Count, nullable=False),
    Column("attempt", _Count, nullable=False),
    Column("content", String, nullable=False),
)
api_tokens = Table(
    "api_tokens",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("role", String, nullable=False),
    Column("secret_hash", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("last_used_at", Float),
)
idempotency = Table(
    "idempotency",
    metadata,
    Column("key", String, primary_key=True),
    Column("token", String, primary_key=True),
    Column("request_hash", String, nullable=False),
    Column("status", Integer, nullable=False),
    Column("body", String, nullable=False),
    Column("created_at", Float, nullable=False),
)


_ENDING = (certificates, tokens, api_tokens)
"""The high-water mark counts what is revoked or used of them, as it does rows of most tables."""


class Queries:
    """Reads rows as records that have their columns as fields, and writes in transactions.

    Args:
        engine: of the database.
        committed: called after each commit that may have changed what the high-water mark counts.
    """

    def __init__(self, engine: Engine, committed: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._committed = committed

    def _all(self, kind: Callable[..., RecordT], query: Select[Any]) -> list[RecordT]:
        with self._engine.connect() as connection:
            return [kind(**row) for row in connection.execute(query).mappings()]

    def _rows(self, query: Select[Any]) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(query))

    def _one(self, kind: Callable[..., RecordT], query: Select[Any]) -> RecordT | None:
        return next(iter(self._all(kind, query)), None)

    @contextmanager
    def _counted(self) -> Iterator[Connection]:
        """A transaction that changes what the high-water mark counts."""
        with self._engine.begin() as connection:
            yield connection
        self._committed()

    def _write(self, *statements: Delete | Insert | Update) -> None:
        """Execute statements in one transaction, in their order."""
        is_counted = any(isinstance(each, Insert) or each.table in _ENDING for each in statements)
        with self._counted() if is_counted else self._engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)
