"""Enrolment tokens: made and shown once, kept as hashes, compared in constant time. Knows nothing of HTTP."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from coordinator.config import CoordinatorConfig
from coordinator.errors import EnrolmentError, NotFoundError
from coordinator.members.bundle_enrolment import federation_to_join, problem_with_new
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.records import TokenRecord, TokenState
from coordinator.storage.store import Store
from fedcg.errors import EXISTS, NOT_FOUND
from fedcg.wire.messages.enrolment_messages import (
    SECRET_BYTES,
    URL_PATTERN,
    Token,
    certificate_key_digest,
    load_certificate,
    message_key_digest,
)

TOKEN_HOURS = 24.0
MAX_TOKEN_HOURS = 24.0 * 90
_NO_HASH = "0" * 64


def create_token(
    home: Home,
    store: Store,
    now: float,
    *,
    device: str | None = None,
    replaces: str | None = None,
    hours: float = TOKEN_HOURS,
    url: str | None = None,
    federation: str | None = None,
) -> Token:
    """Make a token; only its hash is kept.

    Args:
        home: the coordinator's directory.
        store: its database.
        now: unix time.
        device: the only id that it enrols; None lets the device choose.
        replaces: the device whose place a new one takes.
        hours: for how long it can be used.
        url: where devices reach the enrolment listener, when it is not the one in coordinator.toml.
        federation: that the device's agent.toml names; None for the only one.

    Raises:
        EnrolmentError: nothing listens for it, or the device can't be enrolled or replaced.
        ConfigError: the home's configuration is not usable.
        HomeError: the message key can't be loaded.
    """
    url = url or _listener_url(home.config())
    if not re.fullmatch(URL_PATTERN, url):
        raise EnrolmentError(f"--enrolment-url {url}: write https://HOST:PORT, with a port of 1 to 65535")
    if not 0 < hours <= MAX_TOKEN_HOURS:
        raise EnrolmentError(f"a token for {hours:g} hours: choose more than 0 and at most {MAX_TOKEN_HOURS:g} hours")
    federation = federation_to_join(store, federation)
    _check_device(store, device, replaces)
    authority = load_certificate(credential_of(home.pki, CA_NAME).certificate.read_bytes())
    token = Token(
        id=secrets.token_hex(8),
        secret=secrets.token_bytes(SECRET_BYTES),
        authority=certificate_key_digest(authority),
        coordinator=message_key_digest(load_signing_identity(home, store).key.public.hex),
        url=url,
        device=replaces or device,
    )
    expires_at = now + hours * 3600
    kept = _hash(token.secret)
    record = TokenRecord(token.id, kept, token.device, replaces is not None, now, expires_at, federation=federation)
    store.register.add_token(record)
    return token


def _check_device(store: Store, device: str | None, replaces: str | None) -> None:
    if device is not None and replaces is not None and device != replaces:
        raise EnrolmentError(f"--device {device} contradicts --replaces {replaces}: a new device takes over the id")
    if replaces is not None and store.device(replaces) is None:
        raise EnrolmentError(
            f"there is no device {replaces!r} to replace; `fedcg device list` shows all", exit_code=NOT_FOUND
        )
    if replaces is None and device is not None and (problem := problem_with_new(store, device)):
        raise EnrolmentError(problem, exit_code=EXISTS if store.device(device) is not None else None)


def revoke_token(store: Store, token: str, now: float) -> TokenRecord:
    """Make a token unusable; returns what is kept of it.

    Raises:
        NotFoundError: there is none of that id.
        EnrolmentError: it was used already.
    """
    known = store.register.token(token)
    if known is None:
        raise NotFoundError(f"there is no token {token[:80]!r}; `fedcg token list` shows their ids")
    if known.state(now) is TokenState.USED:
        raise EnrolmentError(
            f"token {token!r} was used by device {known.used_by!r}; revoke that with `fedcg device revoke {known.used_by}`"
        )
    store.register.revoke_token(token, now)
    return store.register.token(token) or known


def is_secret_of(token: TokenRecord | None, secret: bytes) -> bool:
    """Whether `secret` is the token's; takes as long where there is no token."""
    kept = _NO_HASH if token is None else token.secret_hash
    return hmac.compare_digest(_hash(secret), kept) and token is not None


def _hash(secret: bytes) -> str:
    # 256 random bits can't be guessed from their hash: a slow hash would only help an attacker who floods the listener
    return hashlib.sha256(secret).hexdigest()


def _listener_url(config: CoordinatorConfig) -> str:
    if config.enrolment_url is None:
        raise EnrolmentError(
            "this coordinator serves no enrolment: set `port` under [enrolment] in coordinator.toml and start it again, or "
            "make a bundle with `fedcg device add`"
        )
    return config.enrolment_url
