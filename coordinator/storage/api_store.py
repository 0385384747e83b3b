"""Queries about the operators' API: its tokens, and the keys of requests that are made once. Part of the store, with the same rules."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from coordinator.rounds.records import ApiTokenRecord
from coordinator.storage import schema

USED_EVERY_S = 60.0
"""The time of a token's last use is stored at most once in so many seconds."""
KEEP_KEYS_S = 86_400.0


class ApiStore(schema.Queries):
    """Tokens of the API, and the keys that its requests have used, in the coordinator's database."""

    def add_token(self, token: ApiTokenRecord) -> None:
        """Store a new token."""
        self._write(insert(schema.api_tokens).values(**asdict(token)))

    def tokens(self) -> list[ApiTokenRecord]:
        """All tokens, oldest first."""
        table = schema.api_tokens
        return self._all(ApiTokenRecord, select(table).order_by(table.c.created_at, table.c.id))

    def token(self, token: str) -> ApiTokenRecord | None:
        """One token."""
        return self._one(ApiTokenRecord, select(schema.api_tokens).filter_by(id=token))

    def revoke_token(self, token: str, now: float) -> None:
        """Make a token unusable; one that was revoked before keeps its time."""
        self._write(update(schema.api_tokens).filter_by(id=token, revoked_at=None).values(revoked_at=now))

    def used_token(self, token: ApiTokenRecord, now: float) -> None:
        """Store that a token was used, unless that was stored less than a minute ago."""
        if token.last_used_at is not None and now - token.last_used_at < USED_EVERY_S:
            return
        table, before = schema.api_tokens, now - USED_EVERY_S
        is_due = or_(table.c.last_used_at.is_(None), table.c.last_used_at <= before)
        self._write(update(table).where(table.c.id == token.id, is_due).values(last_used_at=now))

    def use_key(self, token: str, key: str, now: float) -> bool:
        """Note that a token's request has used a key; False where an earlier one of the last day has.

        Args:
            token: id of the token; keys of different tokens have nothing to do with each other.
            key: as the request named it.
            now: unix time.
        """
        table = schema.used_keys
        try:
            with self._engine.begin() as connection:
                connection.execute(delete(table).where(table.c.used_at < now - KEEP_KEYS_S))
                connection.execute(insert(table).values(token=token, key=key, used_at=now))
        except IntegrityError:
            return False
        return True

    def free_key(self, token: str, key: str) -> None:
        """Let a key be used again: its request has changed nothing."""
        self._write(delete(schema.used_keys).filter_by(token=token, key=key))
