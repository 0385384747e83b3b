"""Tables of the coordinator's database, derived from its records if possible, and reading rows as records. `store` and its parts have the queries.

Every table is keyed by federation, except those of devices, certificates, tokens, used keys, events and the lease. After the first
release, a change here needs a revision in `migrations/versions`; a test compares both.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import sqlalchemy as sa
from pydantic import TypeAdapter

from coordinator.rounds import records

RecordT = TypeVar("RecordT")

metadata = sa.MetaData()
_Count = sa.Integer().with_variant(sa.BigInteger, "postgresql")  # SQLite's INTEGER has 64 bits
_TYPES: dict[type, Any] = {bool: sa.Boolean, int: _Count, float: sa.Float}
ATTEMPT = ("federation", "round", "attempt")


def _table(
    name: str,
    record: type | Mapping[str, type],
    key: Sequence[str],
    references: Mapping[str, sa.Table] = MappingProxyType({}),
) -> sa.Table:
    """The table of a record: a column for each of its fields, with the field's type and default, and for columns only in the key.

    Args:
        name: name of the table.
        record: a dataclass, or fields and their types; all types except numbers and booleans are stored as text.
        key: the columns of the primary key.
        references: by column, the table whose `id` it refers to.
    """
    hints = {column: str if column == "federation" else int for column in ATTEMPT if column in key}
    of_record = record if isinstance(record, Mapping) else get_type_hints(record)
    declared = () if isinstance(record, Mapping) else fields(record)
    defaults = {each.name: each.default for each in declared if each.default is not MISSING}
    columns = []
    for column, hint in {**hints, **of_record}.items():
        kinds = set(get_args(hint)) or {hint}
        (kind,) = kinds - {NoneType}
        default = defaults.get(column)
        columns.append(
            sa.Column(
                column,
                _TYPES.get(kind, sa.String),
                *([sa.ForeignKey(references[column].c.id)] if column in references else []),
                primary_key=column in key,
                autoincrement=False,
                nullable=NoneType in kinds,
                default=default.value if isinstance(default, Enum) else default,
            )
        )
    return sa.Table(name, metadata, *columns)


leases = _table("leases", {"id": int, "epoch": int}, ("id",))
devices = _table("devices", records.DeviceRecord, ("id",))
certificates = _table("certificates", records.CertificateRecord, ("serial",), {"device": devices})
labels = _table("labels", {"device": str, "label": str}, ("device", "label"), {"device": devices})
tokens = _table("tokens", records.TokenRecord, ("id",))
federations = _table("federations", records.FederationRecord, ("id",))
_OF_FEDERATION = {"federation": federations}
_OF_CLIENT, _OF_DEVICE = _OF_FEDERATION | {"client": devices}, _OF_FEDERATION | {"device": devices}
_LINK = {"serial": int, "epoch": int, "old": str, "new": str, "signature": str, "made_at": float}
key_links = _table("key_links", _LINK, ("federation", "serial"), _OF_FEDERATION)
attempts = _table("attempts", records.AttemptRecord, ATTEMPT, _OF_FEDERATION)
participants = _table("participants", records.ParticipantRecord, (*ATTEMPT, "client"), _OF_CLIENT)
updates = _table("updates", records.UpdateRecord, (*ATTEMPT, "client"), _OF_CLIENT)
aggregates = _table("aggregates", records.AggregateRecord, ("federation", "round"), _OF_FEDERATION)
presence = _table("presence", records.PresenceRecord, ("federation", "device", "at"), _OF_DEVICE)
conditions = _table("conditions", records.ConditionRecord, ("federation", "device"), _OF_DEVICE)
_SUM = {"round": int, "attempt": int, "content": str}
sealed_sums = _table("sealed_sums", _SUM, ("federation",), _OF_FEDERATION)
api_tokens = _table("api_tokens", records.ApiTokenRecord, ("id",))
_EVENT = {"id": int, "t": float, "level": int}
_EVENT |= dict.fromkeys(("event", "client", "federation", "message", "content"), str)
events = _table("events", _EVENT, ("id",))
used_keys = _table("used_keys", {"token": str, "key": str, "used_at": float}, ("token", "key"))


_ENDING = (certificates, tokens, api_tokens)
"""The high-water mark counts their revoked or used rows, like the rows of most tables."""


@functools.cache
def _lists_of(kind: Any) -> TypeAdapter[list[Any]]:
    """Makes all records of a query at once, which is faster than one by one."""
    return TypeAdapter(list[kind])


class Queries:
    """Reads rows as records with their columns as fields, and writes in transactions.

    Args:
        engine: of the database.
        committed: called after each commit that may have changed a count of the high-water mark.
    """

    def __init__(self, engine: sa.Engine, committed: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._committed = committed

    def _all(self, kind: Callable[..., RecordT], query: sa.Select[Any]) -> list[RecordT]:
        with self._engine.connect() as connection:
            rows = connection.execute(query)
            names = tuple(rows.keys())
            return _lists_of(kind).validate_python([dict(zip(names, row, strict=True)) for row in rows.all()])

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(query))

    def _one(self, kind: Callable[..., RecordT], query: sa.Select[Any]) -> RecordT | None:
        return next(iter(self._all(kind, query)), None)

    @contextmanager
    def _counted(self) -> Iterator[sa.Connection]:
        """A transaction that may change a count of the high-water mark."""
        with self._engine.begin() as connection:
            yield connection
        self._committed()

    def _write(self, *statements: sa.Delete | sa.Insert | sa.Update) -> None:
        """Execute statements in order in one transaction."""
        is_counted = any(isinstance(each, sa.Insert) or each.table in _ENDING for each in statements)
        with self._counted() if is_counted else self._engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)
