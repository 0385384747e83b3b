"""Creates enrolment tokens and bundles for new devices.

Tokens are used once, shown once, stored as hashes and compared in constant time.

A bundle contains private keys, and a person carries it to the device. A device that enrols by token (`membership`) never sends its private
keys. No HTTP here.
"""

import csv
import hashlib
import hmac
import io
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import BaseModel, Field

from coordinator.config import CoordinatorConfig
from coordinator.errors import EnrolmentError, NotFoundError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, LEAF_LIFE, credential_of, issue
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import CertificateRecord, DeviceState, TokenRecord, TokenState
from coordinator.storage.store import Store
from fedcg.agent_config import CONFIG_NAME, render_agent_config
from fedcg.config_file import Settings
from fedcg.errors import EXISTS, NOT_FOUND
from fedcg.event_log import log_text
from fedcg.files import replace_durably, with_check
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.messages.topics import check_device_id


def make_bundles(
    home: Home, store: Store, ids: Sequence[str], out: Path, now: float, federation: str
) -> dict[str, Path]:
    """Create a bundle per device and register its public key.

    Args:
        home: the coordinator's directory.
        store: its database.
        ids: new devices.
        out: folder for the bundles, `out/<id>`.
        now: unix time.
        federation: federation in their agent.toml; it may be created later (see `federation_to_join` for a default).

    Returns:
        The folder of each bundle.

    Raises:
        EnrolmentError: an id is invalid, in use or repeated; nothing was written.
    """
    _check(store, ids, out)
    coordinator = load_signing_identity(home, store).key.public
    for device in ids:
        key = _write_bundle(home, federation, device, coordinator, out / device)
        certificate = enrolment_messages.load_certificate((out / device / "tls" / "device.pem").read_bytes())
        store.add_device(device, key.hex, now, certificate_record(device, certificate, now))
    return {device: out / device for device in ids}


def federation_to_join(store: Store, named: str | None) -> str:
    """The federation for a new device's agent.toml: the named one, else the only one, or the only one that is not over.

    Raises:
        EnrolmentError: there is none, none with this id, or no id was given for several.
    """
    shown = store.shown_federations()
    there = [record.id for record in shown]
    if not there:
        raise EnrolmentError("there is no federation to join yet; create one with `fedcg federation create`")
    if named is not None and named not in there:
        raise EnrolmentError(f"there is no federation {named!r}; existing: {', '.join(there)}", exit_code=NOT_FOUND)
    live = [
        each.id for each in shown if not (each.status.is_ended or store.round_state(each.id).phase is Phase.FINISHED)
    ]
    meant = [named] if named else live or there
    if len(meant) > 1:
        raise EnrolmentError(f"choose a federation with --federation: {', '.join(there)}")
    return meant[0]


def problem_with_new(store: Store, device: str) -> str:
    """Why a new device can't have this id; empty if it can."""
    try:
        check_device_id(device)
    except ValueError as error:
        return str(error)
    known = store.device(device)
    if known is None:
        return ""
    was = "" if known.state is DeviceState.ENROLLED else f" (it is {known.state.value})"
    return (
        f"device {device!r} already exists{was}; choose another id, or replace the device: "
        f"`fedcg token create --replaces {device}`"
    )


def certificate_record(device: str, certificate: x509.Certificate, now: float) -> CertificateRecord:
    """The record of a certificate issued `now`."""
    return CertificateRecord(
        serial=f"{certificate.serial_number:x}",
        device=device,
        issued_at=now,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        revoked_at=None,
        pem=certificate.public_bytes(Encoding.PEM).decode(),
    )


def _check(store: Store, ids: Sequence[str], out: Path) -> None:
    problems = [f"{device!r} is given twice" for device in sorted(set(ids)) if ids.count(device) > 1]
    for device in ids:
        problem = problem_with_new(store, device)
        if not problem and (out / device).exists():
            problem = f"{out / device} exists; remove it or choose another --out"
        problems += [problem] if problem else []
    if problems:
        is_there = any(store.device(device) is not None or (out / device).exists() for device in ids)
        raise EnrolmentError("\n".join(problems), exit_code=EXISTS if is_there else None)


def _write_bundle(home: Home, federation: str, device: str, coordinator: VerifyKey, target: Path) -> VerifyKey:
    """Write a new device's bundle to `target`; returns its public message key."""
    tls = target / "tls"
    tls.mkdir(parents=True)
    target.chmod(0o700)
    config = home.config()
    # Without an enrolment listener, the device can't renew it
    life = LEAF_LIFE if config.url_of(config.enrolment) is None else timedelta(days=config.enrolment.certificate_days)
    own = issue(home.pki, device, target=tls, life=life)
    own.certificate.rename(tls / "device.pem")
    own.key.rename(tls / "device.key")
    shutil.copyfile(credential_of(home.pki, CA_NAME).certificate, tls / "ca.pem")
    for path in tls.iterdir():
        replace_durably(path, with_check(path.read_bytes()), path.stat().st_mode & 0o777)
    key = SigningKey.generate()
    key.save(target / "signing.key")
    (target / "coordinator.pub").write_bytes(VerifyKey.file_of(coordinator.hex))
    text = render_agent_config(
        federation,
        device,
        host=config.broker.host,
        port=config.broker.port,
        preset=config.broker.preset,
        enrolment_url=config.url_of(config.enrolment),
        carrier_url=config.url_of(config.carrier),
    )
    (target / CONFIG_NAME).write_text(text, encoding="utf-8")
    return key.public


TOKEN_HOURS = 24.0
MAX_TOKEN_HOURS = 24.0 * 90
_NO_HASH = "0" * 64


MAX_BATCH = 200
_RANGE = re.compile(r"([a-z0-9-]*?)(\d{1,6})\.\.\1(\d{1,6})")
_FORGET = 'case "$(history 1 2>&1)" in *FEDCG_TOKEN=*) history -d -1;; esac'
"""Deletes the line from bash's history, unless the blank at its start already kept it out. Shells without a history skip it."""


MAX_LABELS = 16
_Label = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$", examples=["north"])]
Labels = Annotated[tuple[_Label, ...], Field(max_length=MAX_LABELS, description="words of a-z, 0-9 and dashes")]
"""Words that operators give a device."""
Site = Annotated[str, Field(max_length=64, examples=["hall 3"])]
"""Where a device is."""


class WantedToken(Settings, allow_inf_nan=False):
    """An enrolment token to create; the fields are the options of `fedcg token create`.

    Attributes:
        device: the only id that it enrols; None: the device chooses. In a batch, a range of ids.
        replaces: the device that the new one replaces.
        hours: how long it is valid.
        url: URL of the enrolment listener for devices; None for the one in coordinator.toml.
        federation: federation in the device's agent.toml; None for the only one.
        labels, site: what the device gets when it enrols.
    """

    device: Annotated[str, Field(max_length=130, examples=["line-4"])] | None = None
    replaces: Annotated[str, Field(max_length=63)] | None = None
    hours: Annotated[float, Field(gt=0, le=MAX_TOKEN_HOURS)] = TOKEN_HOURS
    url: Annotated[str, Field(max_length=300)] | None = None
    federation: Annotated[str, Field(max_length=63)] | None = None
    labels: Labels = ()
    site: Site = ""


def ids_in(devices: str) -> list[str]:
    """The device ids of a range such as line-1..line-20, at most `MAX_BATCH`.

    Raises:
        EnrolmentError: it is not a range, or it is empty or too long.
    """
    found = _RANGE.fullmatch(devices)
    stem, first, last = found.groups() if found else ("", "1", "0")
    if not 0 <= int(last) - int(first) < MAX_BATCH:
        raise EnrolmentError(f"{devices!r}: write an ascending range of at most {MAX_BATCH} ids, e.g. line-1..line-20")
    return [f"{stem}{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def create_tokens(
    home: Home, store: Store, now: float, wanted: Sequence[WantedToken]
) -> list[tuple[enrolment_messages.Token, TokenRecord]]:
    """Create tokens; only their hashes are stored.

    Raises:
        EnrolmentError: the enrolment listener is off, or a device can't be enrolled or replaced; nothing was created.
        ConfigError: the home's configuration is invalid.
        HomeError: the message key can't be loaded.
    """
    for each in wanted:
        _check_device(store, each.device, each.replaces)
    config, key = home.config(), load_signing_identity(home, store).key.public.hex
    authority = enrolment_messages.load_certificate(credential_of(home.pki, CA_NAME).certificate.read_bytes())
    made = []
    for each in wanted:
        url = each.url or _listener_url(config)
        if not re.fullmatch(enrolment_messages.URL_PATTERN, url):
            raise EnrolmentError(f"--enrolment-url {url}: use https://HOST:PORT, with a port from 1 to 65535")
        token = enrolment_messages.Token(
            id=secrets.token_hex(8),
            secret=secrets.token_bytes(enrolment_messages.SECRET_BYTES),
            authority=enrolment_messages.certificate_key_digest(authority),
            coordinator=enrolment_messages.message_key_digest(key),
            url=url,
            device=each.replaces or each.device,
        )
        about = token.id, _hash(token.secret), token.device, each.replaces is not None, now, now + each.hours * 3600
        labels, site = " ".join(sorted({*each.labels})), log_text(each.site)
        joins = federation_to_join(store, each.federation)
        made.append((token, TokenRecord(*about, federation=joins, labels=labels, site=site)))
    store.register.add_tokens([record for _, record in made])
    return made


def enrol_line(token: enrolment_messages.Token, federation: str | None, data: str = "") -> str:
    """A line for a device's shell that enrols it into the folder ./FEDERATION. It keeps the token out of the process list and bash's history.

    Args:
        token: the device's token.
        federation: the federation that it joins.
        data: folder with the device's images; empty to set it later in agent.toml.
    """
    named = "" if token.device else ' --device "$(uname -n | tr A-Z. a-z-)"'
    images = f" --data {shlex.quote(data)}" if data else ""
    return f" {_FORGET}; FEDCG_TOKEN={token.text} fedcg enrol{named} --out {federation or 'device'}{images}"


def tokens_csv(made: Sequence[Mapping[str, Any]]) -> str:
    """New tokens as CSV: device, token, and the line for the device's shell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("device", "token", "line"), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(made)
    return text.getvalue()


class TokenFacts(BaseModel, frozen=True):
    """An enrolment token without its secret; see `TokenRecord` for the fields."""

    id: str
    state: TokenState
    device: str | None
    replaces: bool
    federation: str | None
    labels: str
    site: str
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None


def token_facts(token: TokenRecord, now: float) -> TokenFacts:
    """An enrolment token without its hash."""
    return TokenFacts(state=token.state(now), **asdict(token))


def _check_device(store: Store, device: str | None, replaces: str | None) -> None:
    if device is not None and replaces is not None and device != replaces:
        raise EnrolmentError(f"--device {device} contradicts --replaces {replaces}: a new device takes over the id")
    if replaces is not None and store.device(replaces) is None:
        raise EnrolmentError(f"no device {replaces!r} to replace; see `fedcg device list`", exit_code=NOT_FOUND)
    if replaces is None and device is not None and (problem := problem_with_new(store, device)):
        raise EnrolmentError(problem, exit_code=EXISTS if store.device(device) is not None else None)


def revoke_token(store: Store, token: str, now: float) -> TokenRecord:
    """Revoke a token and return its record.

    Raises:
        NotFoundError: no token has this id.
        EnrolmentError: it was already used.
    """
    known = store.register.token(token)
    if known is None:
        raise NotFoundError(f"there is no token {token[:80]!r}; see `fedcg token list` for the ids")
    if known.state(now) is TokenState.USED:
        raise EnrolmentError(
            f"token {token!r} was used by device {known.used_by!r}; revoke the device with `fedcg device revoke {known.used_by}`"
        )
    store.register.revoke_token(token, now)
    return store.register.token(token) or known


def is_secret_of(token: TokenRecord | None, secret: bytes) -> bool:
    """Whether `secret` is the token's; takes the same time without a token."""
    kept = _NO_HASH if token is None else token.secret_hash
    return hmac.compare_digest(_hash(secret), kept) and token is not None


def _hash(secret: bytes) -> str:
    # 256 random bits can't be guessed from a hash; a slow hash would only help an attacker who floods the listener
    return hashlib.sha256(secret).hexdigest()


def _listener_url(config: CoordinatorConfig) -> str:
    if (url := config.url_of(config.enrolment)) is None:
        raise EnrolmentError(
            "enrolment is off on this coordinator: set `port` under [enrolment] in coordinator.toml and restart it, or "
            "create a bundle with `fedcg device add`"
        )
    return url
