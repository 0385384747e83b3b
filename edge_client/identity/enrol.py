"""Makes this box a device in one step: keys made here, a token shown over a verified connection, everything written ready to run.

A device of one federation joins another one of the same coordinator with the same identity, and with a store of its own.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import TypeAdapter, ValidationError

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError
from edge_client.identity.credentials import TlsKey, check_issued, load_keys
from edge_client.identity.enrolment_client import ask, check_clock, fetch_authority, trusting
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.agent_config import CONFIG_NAME, DATA, render_agent_config
from fedcg.config_file import set_values
from fedcg.errors import EXISTS
from fedcg.files import fsync_path, replace_durably, with_check
from fedcg.wire.errors import WireError
from fedcg.wire.messages.enrolment_messages import (
    ENROL_PATH,
    EnrolAnswer,
    EnrolRequest,
    Token,
    answer_statement,
    enrolment_statement,
    message_key_digest,
)
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.messages.schemas import Identifier
from fedcg.wire.messages.topics import check_device_id
from fedcg.wire.tls import SET_CLOCK

MAY_BE_THERE = frozenset({"signing.key", "tls", "data", "store"})
"""The entries that a new device's folder may hold: keys of an attempt without answer, images, a private store."""
STORE = "store"


class Folder:
    """A device's folder; a bundle has the same files.

    Attributes:
        config: agent.toml; written last, so its presence means that the device is complete.
        signing_key: the message key.
        coordinator_key: the coordinator's public message key.
        authority: the authority's certificate.
        certificate: the device's certificate.
        tls_key: the key of the certificate.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / CONFIG_NAME
        self.signing_key = root / "signing.key"
        self.coordinator_key = root / "coordinator.pub"
        self.authority = root / "tls" / "ca.pem"
        self.certificate = root / "tls" / "device.pem"
        self.tls_key = root / "tls" / "device.key"


@dataclass(frozen=True)
class Enrolled:
    """A device that is ready to run."""

    device: str
    federation: str
    config: Path
    certificate: x509.Certificate


def enrol(token: Token, out: Path, *, url: str | None = None, device: str | None = None, data: str = DATA) -> Enrolled:
    """Enrol this box.

    The keys are made before anything is requested and stay in `out` when it fails, so that the same command, run again, asks
    for the same device and gets the same answer even if the first one was lost on the way.

    Args:
        token: from the operator.
        out: the device's folder; must not hold a device yet.
        url: the enrolment listener; default the token's.
        device: the id that this box wants; default the token's.
        data: where the images are, for agent.toml.

    Raises:
        EnrolError: its message names the next step; also with clocks with which the new certificate would not be valid here. When another authority, or another of its servers, answered, the secret was not sent.
    """
    place, name = _wanted(token, url, device)
    folder = Folder(out)
    _check_folder(folder)
    authority, ahead_s = fetch_authority(place, token.authority)
    check_clock(ahead_s, f"The token was not used. {SET_CLOCK.capitalize()}, then enrol again")
    tls_key, signing_key = _keys(folder)
    public = signing_key.public.hex
    proof = signing_key.sign(enrolment_statement(token.id, name, tls_key.digest, public)).hex()
    request = EnrolRequest(
        token=token.id,
        secret=token.secret.hex(),
        device=name,
        request=tls_key.request(name),
        signing_key=public,
        proof=proof,
        nonce=secrets.token_hex(16),
    )
    answer = ask(place, ENROL_PATH, request, EnrolAnswer, trusting(authority))
    _check_answer(token, request, answer)
    certificate = check_issued(answer.certificate, authority, name, tls_key)
    _write(folder, answer, authority, place, data)
    return Enrolled(name, answer.federation, folder.config, certificate)


def _wanted(token: Token, url: str | None, device: str | None) -> tuple[str, str]:
    place, name = url or token.url, device or token.device
    if place is None:
        raise EnrolError("the token names no coordinator: give --url https://HOST:PORT")
    if name is None:
        raise EnrolError("the token is for any device: name this one with --device ID")
    if token.device is not None and name != token.device:
        raise EnrolError(f"--device {name}: the token is for device {token.device!r} only; leave --device out")
    try:
        return place.rstrip("/"), check_device_id(name)
    except ValueError as error:
        raise EnrolError(f"--device: {error}") from error


def _check_answer(token: Token, request: EnrolRequest, answer: EnrolAnswer) -> None:
    """Check that the coordinator of the token answered this very request."""
    if message_key_digest(answer.coordinator_key) != token.coordinator:
        raise EnrolError(
            "the answer names another message key than the token. Either the coordinator's key was replaced after the token was "
            "made, or somebody is in between: ask the operator, and for a new token (`fedcg token create`)"
        )
    key, signature = VerifyKey.from_hex(answer.coordinator_key), bytes.fromhex(answer.signature or "")
    if not key.verifies(signature, answer_statement(request, answer)):
        raise EnrolError(
            "the answer is not signed by the coordinator for this request: somebody is in between; ask the operator"
        )
    if answer.device != request.device:
        raise EnrolError(f"the coordinator answered for {answer.device}, not for {request.device}")


def _check_folder(folder: Folder) -> None:
    if folder.config.exists():
        raise EnrolError(
            f"{folder.config} exists: this folder holds a device already; choose another --out", exit_code=EXISTS
        )
    if folder.root.exists():
        foreign = sorted(path.name for path in folder.root.iterdir() if path.name not in MAY_BE_THERE)
        if foreign:
            problem = f"{folder.root} holds other things ({foreign[0]}); give the device a folder of its own, --out"
            raise EnrolError(problem, exit_code=EXISTS)


def _keys(folder: Folder) -> tuple[TlsKey, SigningKey]:
    """The keys of an attempt that did not get its answer, or new ones."""
    folder.tls_key.parent.mkdir(parents=True, exist_ok=True)
    folder.root.chmod(0o700)
    folder.tls_key.parent.chmod(0o700)
    try:
        if not folder.signing_key.exists():
            SigningKey.generate().save(folder.signing_key)
        signing_key = SigningKey.load(folder.signing_key)
    except (OSError, WireError) as error:
        raise EnrolError(f"the message key can't be kept: {error}") from error
    if not folder.tls_key.exists():
        replace_durably(folder.tls_key, with_check(TlsKey.generate().pem()))
    return TlsKey.load(folder.tls_key), signing_key


def _write(folder: Folder, answer: EnrolAnswer, authority: x509.Certificate, url: str, data: str) -> None:
    text = render_agent_config(
        answer.federation,
        answer.device,
        host=answer.broker_host,
        port=answer.broker_port,
        preset=answer.broker_preset,
        enrolment_url=url,
        carrier_url=answer.carrier_url,
        data=data,
    )
    replace_durably(folder.authority, with_check(authority.public_bytes(Encoding.PEM)))
    replace_durably(folder.certificate, with_check(answer.certificate.encode()))
    replace_durably(folder.coordinator_key, VerifyKey.file_of(answer.coordinator_key))
    replace_durably(folder.config, text.encode())
    fsync_path(folder.root.parent)


def join(config: AgentConfig, text: str, federation: str, out: Path, data: str) -> Path:
    """Write the configuration of this device in another federation.

    It names the keys and certificates of the first federation's folder, so both agents use and renew the same ones; the
    owner's policy and the settings of the first one are taken over.

    Args:
        config: of the device in its first federation.
        text: its agent.toml.
        federation: the federation to join.
        out: the folder for agent.toml and the private store; must be new or empty.
        data: where the images are.

    Returns:
        The new agent.toml.

    Raises:
        EnrolError: names what is wrong with the federation or the folder.
        EdgeError: the device's keys or private store can't be used.
    """
    try:
        TypeAdapter(Identifier).validate_python(federation)
    except ValidationError as error:
        raise EnrolError(f"--federation {federation!r}: an id has 1 to 63 small letters, digits and dashes") from error
    if federation == config.federation:
        raise EnrolError(f"--federation {federation}: this device is in it already, by {config.store.parent}")
    if out.exists() and any(out.iterdir()):
        raise EnrolError(f"--out {out} is not empty: give the federation a folder of its own", exit_code=EXISTS)
    enrolled = load_keys(config).coordinator
    values: dict[tuple[str, str], str | bool | float | list[str]] = {
        ("", "federation"): federation,
        ("", "store"): STORE,
        ("keys", "signing"): str(config.keys.signing.absolute()),
        ("keys", "coordinator"): str(config.keys.coordinator.absolute()),
        ("data", "root"): data,
    }
    own = {
        ("audit", "auxiliary"): config.audit.auxiliary,
        ("eligibility", "lock_file"): config.eligibility.lock_file,
        ("eligibility", "stop_file"): config.eligibility.stop_file,
        ("", "metrics_folder"): config.metrics_folder,
    }
    values |= {name: str(path.absolute()) for name, path in own.items() if path is not None}
    if config.tls is not None:
        values |= {("tls", name): str(path.absolute()) for name, path in config.tls}
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    pinned = open_store(config).pinned_key(enrolled)
    store = PrivateStore.open(out / STORE, federation, config.device)
    if pinned.key != enrolled:  # the key that counts now, not one that was replaced, and perhaps stolen
        store.save_pinned_key(enrolled, pinned)
    written = out / CONFIG_NAME
    comment = (
        f"# Device {config.device} in federation {federation}; keys and certificates are those of {config.federation}."
    )
    body = text.partition("\n")[2] if text.startswith("# Agent of device ") else text
    replace_durably(written, f"{comment}\n{set_values(body, values)}".encode())
    fsync_path(out.parent)
    return written
