"""API tokens for people and programs: shown once at creation, stored as salted hashes. No HTTP here."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum

from pydantic import BaseModel

from coordinator.errors import NotFoundError, SteeringError
from coordinator.paths import Home
from coordinator.rounds.records import ApiTokenRecord
from coordinator.storage.locks import changing_members
from coordinator.storage.member_store import ApiStore
from fedcg.files import replace_durably
from fedcg.values import Value

SECRET_BYTES = 32
SALT_BYTES = 16
DAYS = 90.0
"""Default days until a token expires."""
MAX_DAYS = 3650.0
DAY_S = 86_400.0
LOCAL_NAME = "local"
_TEXT = re.compile(r"fcga_(?P<id>[0-9a-f]{16})_(?P<secret>[0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_NO_HASH = f"{'0' * 32}${'0' * 64}"


class Role(str, Enum):
    """Permissions of a token; each role includes the previous one."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether this role may do what `other` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Identity(Value):
    """The sender of a request: name, role, and id of its token. For a person from an OpenID Connect provider, that is the issuer, #, and the id there."""

    name: str
    role: Role
    token_id: str


class NewToken(Value):
    """A new token; `text` is shown once and never stored."""

    text: str
    record: ApiTokenRecord


class ApiTokenFacts(BaseModel, frozen=True):
    """An API token; `is_valid`: neither revoked nor expired."""

    id: str
    name: str
    role: Role
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    is_valid: bool


def api_token_facts(token: ApiTokenRecord, now: float) -> ApiTokenFacts:
    """An API token without its hash."""
    return ApiTokenFacts(is_valid=token.is_valid(now), **asdict(token))


class ApiTokens:
    """Creates, checks and revokes API tokens. Blocks; thread-safe.

    Args:
        store: stores the tokens.
        clock: unix time.
    """

    def __init__(self, store: ApiStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def create(self, name: str, role: Role, days: float | None = DAYS) -> NewToken:
        """Create a token.

        Args:
            name: name of its person or program; appears in the audit log.
            role: its permissions.
            days: days until it expires; None for never, only for the token of the commands on this machine.

        Raises:
            SteeringError: invalid name.
        """
        if not _NAME.fullmatch(name):
            raise SteeringError(f"name {name[:80]!r}: use 1 to 64 letters, digits, spaces and . _ @ -")
        now, token, secret = self._clock(), secrets.token_hex(8), secrets.token_hex(SECRET_BYTES)
        expires_at = None if days is None else now + days * DAY_S
        kept = _hash(secrets.token_hex(SALT_BYTES), secret)
        record = ApiTokenRecord(token, name, role.value, kept, now, expires_at)
        self._store.add_token(record)
        return NewToken(f"fcga_{token}_{secret}", record)

    def list(self) -> list[ApiTokenRecord]:
        """All tokens, oldest first."""
        return self._store.tokens()

    def revoke(self, token: str) -> ApiTokenRecord:
        """Revoke a token and all sessions opened with it, at once. Idempotent.

        Raises:
            NotFoundError: no token has this id.
        """
        self._store.revoke_token(token, self._clock())
        known = self._store.token(token)
        if known is None:
            raise NotFoundError(f"there is no API token {token[:80]!r}; see `fedcg coordinator token list` for the ids")
        return known

    def check(self, text: str) -> Identity | None:
        """The identity of a token; None if it is unknown, wrong, expired or revoked. Takes the same time in each case."""
        found = _TEXT.fullmatch(text)
        record = None if found is None else self._store.token(found["id"])
        salt, _, _ = (kept := _NO_HASH if record is None else record.secret_hash).partition("$")
        is_right = hmac.compare_digest(_hash(salt, "" if found is None else found["secret"]), kept)
        return self._identity(record) if is_right else None

    def of_session(self, token: str) -> Identity | None:
        """The identity of a session, from the id of the token that opened it; None if that is no longer valid."""
        return self._identity(self._store.token(token))

    def _identity(self, record: ApiTokenRecord | None) -> Identity | None:
        now = self._clock()
        if record is None or not record.is_valid(now):
            return None
        self._store.used_token(record, now)
        return Identity(record.name, Role(record.role), record.id)


def local_token(home: Home, tokens: ApiTokens) -> str:
    """The token of the commands on the coordinator's machine, in HOME/api.token (0600); created again if missing or invalid.

    Call it without `changing_members` held.
    """
    text = _valid_text(home, tokens)
    if text is not None:
        return text
    with changing_members(home):  # two commands may find it missing at the same time
        text = _valid_text(home, tokens)
        if text is not None:
            return text
        for known in tokens.list():
            if known.name == LOCAL_NAME and known.revoked_at is None:
                tokens.revoke(known.id)  # its text is lost
        made = tokens.create(LOCAL_NAME, Role.ADMIN, days=None)
        replace_durably(home.api_token, f"{made.text}\n")
    return made.text


def _valid_text(home: Home, tokens: ApiTokens) -> str | None:
    if not home.api_token.is_file():
        return None
    text = home.api_token.read_text(encoding="utf-8").strip()
    return None if tokens.check(text) is None else text


def _hash(salt: str, secret: str) -> str:
    # 256 random bits can't be guessed from a hash; a slow hash would only help an attacker who floods the API
    return f"{salt}${hashlib.sha256(f'{salt}{secret}'.encode()).hexdigest()}"
