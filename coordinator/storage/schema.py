"""Tables of the coordinator's database, made of its records where there is one, and reading rows as records. Queries live in `store` and its parts.

Every table is keyed by federation but those of devices, certificates, tokens, used keys, events and the lease. After the
first release a change here comes with a revision in `migrations/versions`; a test compares both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import sqlalchemy as sa

from coordinator.rounds import records

RecordT = TypeVar("RecordT")

metadata = sa.MetaData()
_Count = sa.Integer().with_variant(sa.BigInteger, "postgresql")  # SQLite's INTEGER has 64 bits
_TYPES: dict[type, Any] = {bool: sa.Boolean, int: _Count, float: sa.Float}
ATTEMPT = ("federation", "round", "attempt")


def _table(
    name: str, record: type, key: Sequence[str], references: Mapping[str, sa.Table] = MappingProxyType({})
) -> sa.Table:
    """The table of a record: a column for each of its fields, with the field's type and default, and for what only its key has.

    Args:
        name: of the table.
        record: a dataclass; anything but numbers and booleans is text in its column.
        key: the columns of the primary key.
        references: by column, the table whose `id` it holds.
    """
    hints = {column: str if column == "federation" else int for column in ATTEMPT if column in key}
    defaults = {each.name: each.default for each in fields(record) if each.default is not MISSING}
    columns = []
    for column, hint in {**hints, **get_type_hints(record)}.items():
        kinds = set(get_args(hint)) or {hint}
        (kind,) = kinds - {NoneType}
        default = defaults.get(column)
        columns.append(
            sa.Column(
                column,
                _TYPES.get(kind, sa.String),
                *([sa.ForeignKey(references[column].c.id)] if column in references else []),
                primary_key=column in key,
                nullable=NoneType in kinds,
                default=default.value if isinstance(default, Enum) else default,
            )
        )
    return sa.Table(name, metadata, *columns)


leases = sa.Table(
    "leases", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("epoch", _Count, nullable=False)
)
devices = _table("devices", records.DeviceRecord, ("id",))
certificates = _table("certificates", records.CertificateRecord, ("serial",), {"device": devices})
tokens = _table("tokens", records.TokenRecord, ("id",))
federations = _table("federations", records.FederationRecord, ("id",))
_OF_FEDERATION = {"federation": federations}
_OF_CLIENT, _OF_DEVICE = _OF_FEDERATION | {"client": devices}, _OF_FEDERATION | {"device": devices}
key_links = sa.Table(
    "key_links",
    metadata,
    sa.Column("federation", sa.ForeignKey("federations.id"), primary_key=True),
    sa.Column("serial", _Count, primary_key=True),
    sa.Column("epoch", _Count, nullable=False),
    sa.Column("old", sa.String, nullable=False),
    sa.Column("new", sa.String, nullable=False),
    sa.Column("signature", sa.String, nullable=False),
    sa.Column("made_at", sa.Float, nullable=False),
)
attempts = _table("attempts", records.AttemptRecord, ATTEMPT, _OF_FEDERATION)
participants = _table("participants", records.ParticipantRecord, (*ATTEMPT, "client"), _OF_CLIENT)
updates = _table("updates", records.UpdateRecord, (*ATTEMPT, "client"), _OF_CLIENT)
aggregates = _table("aggregates", records.AggregateRecord, ("federation", "round"), _OF_FEDERATION)
presence = _table("presence", records.PresenceRecord, ("federation", "device", "at"), _OF_DEVICE)
conditions = _table("conditions", records.ConditionRecord, ("federation", "device"), _OF_DEVICE)
sealed_sums = sa.Table(
    "sealed_sums",
    metadata,
    sa.Column("federation", sa.ForeignKey("federations.id"), primary_key=True),
    sa.Column("round", _Count, nullable=False),
    sa.Column("attempt", _Count, nullable=False),
    sa.Column("content", sa.String, nullable=False),
)
api_tokens = _table("api_tokens", records.ApiTokenRecord, ("id",))
events = sa.Table(
    "events",
    metadata,
    sa.Column("id", _Count, primary_key=True, autoincrement=False),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("client", sa.String, nullable=False),
    sa.Column("federation", sa.String, nullable=False),
    sa.Column("level", sa.Integer, nullable=False),
    sa.Column("message", sa.String, nullable=False),
    sa.Column("content", sa.String, nullable=False),
)
used_keys = sa.Table(
    "used_keys",
    metadata,
    sa.Column("token", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("used_at", sa.Float, nullable=False),
)


_ENDING = (certificates, tokens, api_tokens)
"""The high-water mark counts what is revoked or used of them, as it does rows of most tables."""


class Queries:
    """Reads rows as records that have their columns as fields, and writes in transactions.

    Args:
        engine: of the database.
        committed: called after each commit that may have changed what the high-water mark counts.
    """

    def __init__(self, engine: sa.Engine, committed: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._committed = committed

    def _all(self, kind: Callable[..., RecordT], query: sa.Select[Any]) -> list[RecordT]:
        with self._engine.connect() as connection:
            return [kind(**row) for row in connection.execute(query).mappings()]

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(query))

    def _one(self, kind: Callable[..., RecordT], query: sa.Select[Any]) -> RecordT | None:
        return next(iter(self._all(kind, query)), None)

    @contextmanager
    def _counted(self) -> Iterator[sa.Connection]:
        """A transaction that changes what the high-water mark counts."""
        with self._engine.begin() as connection:
            yield connection
        self._committed()

    def _write(self, *statements: sa.Delete | sa.Insert | sa.Update) -> None:
        """Execute statements in one transaction, in their order."""
        is_counted = any(isinstance(each, sa.Insert) or each.table in _ENDING for each in statements)
        with self._counted() if is_counted else self._engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)
