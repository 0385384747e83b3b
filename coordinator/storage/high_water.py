"""The high-water mark: a small signed file of what the database has held, so that a database that lost commits is noticed.

It counts only what never falls. It is raised after the commit that it counts, so it may lag behind the database and is never ahead of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import time

from sqlalchemy import Connection, Engine, delete, func, insert, select

from coordinator.errors import StoreError
from coordinator.paths import Home
from coordinator.storage import schema
from coordinator.storage.database import database_of, name_of
from fedcg.files import PRIVATE, replace_durably

EPOCH_STEP = 1_000_000
"""Added to the epoch of a recovery where the clock is behind it: more than the coordinator can have been started since."""
_DOMAIN = b"fedcg high-water mark 1\0"
_COUNTED = {
    "devices": schema.devices.c.id,
    "certificates": schema.certificates.c.serial,
    "revoked certificates": schema.certificates.c.revoked_at,
    "tokens": schema.tokens.c.id,
    "used tokens": schema.tokens.c.used_at,
    "revoked tokens": schema.tokens.c.revoked_at,
    "API tokens": schema.api_tokens.c.id,
    "revoked API tokens": schema.api_tokens.c.revoked_at,
    "federations": schema.federations.c.id,
    "replacements of the message key": schema.key_links.c.serial,
}
_OF_FEDERATIONS = {"aggregates": schema.aggregates.c.federation, "attempts": schema.attempts.c.federation}
"""Columns whose values are counted, without nulls: all, and those of each federation."""

log = logging.getLogger(__name__)


def recovered_epoch(epoch: int) -> int:
    """The epoch after a backup is restored or a loss is accepted: the time in milliseconds, above those of earlier recoveries and their starts.

    Args:
        epoch: the highest one that is known here; a coordinator of another backup may have taken later ones.
    """
    now = int(1000 * time.time())
    return now if now > epoch else epoch + EPOCH_STEP


def counts_of(connection: Connection) -> dict[str, int]:
    """What the database holds, by name; none of these numbers ever falls."""
    found = {name: connection.execute(select(func.count(column))).scalar_one() for name, column in _COUNTED.items()}
    found["epoch"] = connection.execute(select(schema.leases.c.epoch)).scalar_one_or_none() or 0
    for name, column in _OF_FEDERATIONS.items():
        rows = connection.execute(select(column, func.count()).group_by(column))
        found |= {f"{name} of {federation}": count for federation, count in rows}
    return found


class HighWater:
    """The mark of one home's database.

    Args:
        home: where its file and the secret that signs it are.
        engine: of the database.
    """

    def __init__(self, home: Home, engine: Engine) -> None:
        self._home, self._path, self._engine = home, home.high_water, engine
        self._raised: dict[str, int] = {}

    def check(self) -> None:
        """Check that the database holds what it has held before.

        Raises:
            StoreError: commits are lost, or the mark is; says which, and how to go on.
        """
        mark = self._read()  # before the database, whose numbers may only rise meanwhile
        with self._engine.connect() as connection:
            held = counts_of(connection)
        if mark is None:
            if self._engine.dialect.name == "sqlite" and any(held.values()):
                raise StoreError(f"{self._path} is missing: the database may have lost commits. {self._advice()}")
            self.lift()  # a new home, or a machine that takes over with a copy of configuration and keys
        elif lost := [name for name, count in mark.items() if held.get(name, 0) < count]:
            missing = ", ".join(f"{name} ({held.get(name, 0)} now, {mark[name]} before)" for name in lost)
            raise StoreError(f"{name_of(database_of(self._home))} has lost commits: {missing}. {self._advice()}")

    def lift(self) -> None:
        """Raise the mark to what the database holds; a disk that does not take it is reported, and the mark lags behind."""
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._engine.connect() as connection:
                held = counts_of(connection)
            if held != self._raised:
                body = json.dumps(held, sort_keys=True)
                replace_durably(self._path, f"{body}\n{self._signature(body)}\n")
                self._raised = held
        except OSError as error:
            log.warning("%s can't be written, and the next change writes it: %s", self._path, error)
        finally:
            os.close(lock)

    def accept_loss(self) -> None:
        """Take the database as it is, with an epoch above all that devices may have seen."""
        try:
            self.check()
        except StoreError as error:
            log.warning("going on without what is lost: %s", error)
        try:
            mark = self._read() or {}
        except StoreError:
            mark = {}
        with self._engine.begin() as connection:
            epoch = recovered_epoch(max(counts_of(connection)["epoch"], mark.get("epoch", 0)))
            connection.execute(delete(schema.leases))  # the row itself may be lost
            connection.execute(insert(schema.leases).values(id=1, epoch=epoch))
        self.lift()

    def _advice(self) -> str:
        return (
            "Restore a backup into a new directory: `fedcg coordinator restore FILE --dir NEW`. Or go on without what is lost: "
            f"`fedcg coordinator run --dir {self._home.root} --accept-loss`. Then compare {self._home.events_file} "
            "with `fedcg device list`, and revoke or enrol again"
        )

    def _read(self) -> dict[str, int] | None:
        """The mark, None without one.

        Raises:
            StoreError: it is damaged, or signed with another secret.
        """
        try:
            body, _, signature = self._path.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None
        except ValueError:
            body = signature = ""
        if not hmac.compare_digest(signature.strip().encode(), self._signature(body).encode()):
            raise StoreError(f"{self._path} is damaged, or signed with another secret. {self._advice()}")
        return {str(name): int(count) for name, count in json.loads(body).items()}

    def _signature(self, body: str) -> str:
        return hmac.new(self._home.secret(), _DOMAIN + body.encode(), hashlib.sha256).hexdigest()
