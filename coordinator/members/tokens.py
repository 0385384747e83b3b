"""Enrolment tokens: made and shown once, kept as hashes, compared in constant time. Knows nothing of HTTP."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from coordinator.config import CoordinatorConfig
from coordinator.errors import EnrolmentError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from coordinator.pki.signing_keys import voice_of
from coordinator.rounds.records import DeviceState, TokenRecord, TokenState
from coordinator.storage.store import Store
from fedcg.wire.messages.enrolment_messages import (
    SECRET_BYTES,
    URL_PATTERN,
    Token,
    certificate_key_digest,
    load_certificate,
    message_key_digest,
)
from fedcg.wire.messages.topics import check_device_id

TOKEN_HOURS = 24.0
MAX_TOKEN_HOURS = 24.0 * 90
_NOBODY = "0" * 64


@dataclass(frozen=True)
class Wish:
    """What a token shall be good for.

    Attributes:
        device: the only id that it enrols; None lets the box choose.
        replaces: put a new box in the place of `device`.
        hours: for how long it can be used.
        url: where boxes reach the enrolment listener, when it is not what coordinator.toml says.
    """

    device: str | None = None
    replaces: bool = False
    hours: float = TOKEN_HOURS
    url: str | None = None


def create_token(home: Home, store: Store, wish: Wish, now: float) -> Token:
    """Make a token; only its hash is kept.

    Raises:
        EnrolmentError: nothing listens for it, or the device can't be enrolled or replaced.
        ConfigError: the home's configuration is not usable.
        HomeError: the message key can't be loaded.
    """
    url = wish.url or _listener_url(home.config())
    if not re.fullmatch(URL_PATTERN, url):
        raise EnrolmentError(f"--url {url}: write https://HOST:PORT")
    if not 0 < wish.hours <= MAX_TOKEN_HOURS:
        raise EnrolmentError(f"--hours {wish.hours:g}: choose more than 0 and at most {MAX_TOKEN_HOURS:g}")
    if not store.federations():
        raise EnrolmentError("there is no federation to join yet; open one with `fedcg federation create`")
    if wish.device is not None:
        _check_device(store, wish.device, replaces=wish.replaces)
    authority = load_certificate(credential_of(home.pki, CA_NAME).certificate.read_bytes())
    token = Token(
        id=secrets.token_hex(8),
        secret=secrets.token_bytes(SECRET_BYTES),
        authority=certificate_key_digest(authority),
        coordinator=message_key_digest(voice_of(home, store).key.public.hex),
        url=url,
        device=wish.device,
    )
    record = TokenRecord(token.id, _hash(token.secret), wish.device, wish.replaces, now, now + wish.hours * 3600)
    store.register.add_token(record)
    return token


def revoke_token(store: Store, token: str, now: float) -> TokenRecord:
    """Make a token good for nothing.

    Raises:
        EnrolmentError: there is none of that id, or it was used already.
    """
    known = store.register.token(token)
    if known is None:
        raise EnrolmentError(f"there is no token {token!r}; `fedcg token list` shows their ids")
    if known.state(now) is TokenState.USED:
        raise EnrolmentError(
            f"token {token!r} was used by device {known.used_by!r}; revoke that with `fedcg device revoke {known.used_by}`"
        )
    store.register.revoke_token(token, now)
    return known


def is_secret_of(token: TokenRecord | None, secret: bytes) -> bool:
    """Whether `secret` is the token's; takes as long for a token that there never was."""
    kept = _NOBODY if token is None else token.secret_hash
    return hmac.compare_digest(_hash(secret), kept) and token is not None


def _hash(secret: bytes) -> str:
    # 256 random bits can't be guessed from their hash: a slow hash would only help whoever floods the listener
    return hashlib.sha256(secret).hexdigest()


def _listener_url(config: CoordinatorConfig) -> str:
    if config.enrolment_url is None:
        raise EnrolmentError(
            "this coordinator serves no enrolment: set `port` under [enrolment] in coordinator.toml and start it again, or "
            "make a bundle with `fedcg device add`"
        )
    return config.enrolment_url


def _check_device(store: Store, device: str, *, replaces: bool) -> None:
    try:
        check_device_id(device)
    except ValueError as error:
        raise EnrolmentError(str(error)) from error
    known = store.device(device)
    if replaces and known is None:
        raise EnrolmentError(f"there is no device {device!r} to replace; `fedcg device list` shows all")
    if known is not None and not replaces:
        was = "" if known.state is DeviceState.ENROLLED else f" (it is {known.state.value})"
        raise EnrolmentError(
            f"there is a device {device!r} already{was}; for a new box in its place use --replaces {device}"
        )
