"""Enrols this machine as a device: creates keys, presents a token over a verified connection, writes a configuration that is ready to run.

A device of one federation joins another federation of the same coordinator with the same identity and a separate store.
"""

import secrets
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
from fedcg.values import Value
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
"""Entries allowed in a new device's folder: keys from an unanswered attempt, images, a private store."""
STORE = "store"


class Folder:
    """A device's folder; a bundle has the same files.

    Attributes:
        config: agent.toml. It is written last, so its presence means that the device is complete.
        signing_key: the message key.
        coordinator_key: the coordinator's public message key.
        authority: the authority's certificate.
        certificate: the device's certificate.
        tls_key: the certificate's key.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / CONFIG_NAME
        self.signing_key = root / "signing.key"
        self.coordinator_key = root / "coordinator.pub"
        self.authority = root / "tls" / "ca.pem"
        self.certificate = root / "tls" / "device.pem"
        self.tls_key = root / "tls" / "device.key"


class Enrolled(Value):
    """A device that is ready to run."""

    device: str
    federation: str
    config: Path
    certificate: x509.Certificate


def enrol(token: Token, out: Path, *, url: str | None = None, device: str | None = None, data: str = DATA) -> Enrolled:
    """Enrol this machine.

    Keys are created before the request and stay in `out` if it fails. So the same command can be repeated: it requests the same device and
    gets the same answer, even if the first answer was lost.

    Args:
        token: from the operator.
        out: the device's folder; must not contain a device yet.
        url: the enrolment listener; default: from the token.
        device: the requested device id; default: from the token.
        data: path of the images, for agent.toml.

    Raises:
        EnrolError: the message names the next step. Also raised if the clocks differ so much that the new certificate would not be valid here.
            If another authority or server answered, the secret was not sent.
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
        raise EnrolError("the token contains no coordinator address: give --url https://HOST:PORT")
    if name is None:
        raise EnrolError("the token is for any device: set this device's id with --device ID")
    if token.device is not None and name != token.device:
        raise EnrolError(f"--device {name}: the token is for device {token.device!r} only; omit --device")
    try:
        return place.rstrip("/"), check_device_id(name)
    except ValueError as error:
        raise EnrolError(f"--device: {error}") from error


def _check_answer(token: Token, request: EnrolRequest, answer: EnrolAnswer) -> None:
    """Check that the token's coordinator answered this request."""
    if message_key_digest(answer.coordinator_key) != token.coordinator:
        raise EnrolError(
            "the answer has a different message key than the token. Either the coordinator's key was replaced after the token was "
            "created, or the connection is intercepted: ask the operator for a new token (`fedcg token create`)"
        )
    key, signature = VerifyKey.from_hex(answer.coordinator_key), bytes.fromhex(answer.signature or "")
    if not key.verifies(signature, answer_statement(request, answer)):
        raise EnrolError(
            "the answer is not signed by the coordinator for this request. The connection may be intercepted: ask the operator"
        )
    if answer.device != request.device:
        raise EnrolError(f"the coordinator answered for {answer.device}, not for {request.device}")


def _check_folder(folder: Folder) -> None:
    if folder.config.exists():
        raise EnrolError(
            f"{folder.config} exists: this folder already contains a device; choose another --out", exit_code=EXISTS
        )
    if folder.root.exists():
        foreign = sorted(path.name for path in folder.root.iterdir() if path.name not in MAY_BE_THERE)
        if foreign:
            problem = f"{folder.root} contains other files ({foreign[0]}); choose an empty folder with --out"
            raise EnrolError(problem, exit_code=EXISTS)


def _keys(folder: Folder) -> tuple[TlsKey, SigningKey]:
    """The keys of an earlier unanswered attempt, or new ones."""
    folder.tls_key.parent.mkdir(parents=True, exist_ok=True)
    folder.root.chmod(0o700)
    folder.tls_key.parent.chmod(0o700)
    try:
        if not folder.signing_key.exists():
            SigningKey.generate().save(folder.signing_key)
        signing_key = SigningKey.load(folder.signing_key)
    except (OSError, WireError) as error:
        raise EnrolError(f"the message key can't be saved: {error}") from error
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
    """Write the configuration of this device for another federation.

    It refers to the keys and certificates in the first federation's folder, so both agents use and renew the same files. The owner's policy
    and settings are copied.

    Args:
        config: of the device for its first federation.
        text: its agent.toml.
        federation: the federation to join.
        out: folder for agent.toml and the private store; must be new or empty.
        data: path of the images.

    Returns:
        Path of the new agent.toml.
        EdgeError: the device's keys or private store can't be used.
    """
    try:
        TypeAdapter(Identifier).validate_python(federation)
    except ValidationError as error:
        raise EnrolError(f"--federation {federation!r}: use 1 to 63 lowercase letters, digits and dashes") from error
    if federation == config.federation:
        raise EnrolError(f"--federation {federation}: this device is already in it, see {config.store.parent}")
    if out.exists() and any(out.iterdir()):
        raise EnrolError(f"--out {out} is not empty: choose a separate folder for the federation", exit_code=EXISTS)
    enrolled = load_keys(config).coordinator
    values: dict[tuple[str, str], str | bool | float | list[str]] = {
        ("", "federation"): federation,
        ("", "store"): STORE,
        ("keys", "signing"): str(config.keys.signing.absolute()),
        ("keys", "coordinator"): str(config.keys.coordinator.absolute()),
        ("data", "root"): data,
    }
    own = {("audit", "auxiliary"): config.audit.auxiliary, ("eligibility", "stop_file"): config.eligibility.stop_file}
    values |= {name: str(path.absolute()) for name, path in own.items() if path is not None}
    if config.tls is not None:
        values |= {("tls", name): str(path.absolute()) for name, path in config.tls}
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    pinned = open_store(config).pinned_key(enrolled)
    store = PrivateStore.open(out / STORE, federation, config.device)
    if pinned.key != enrolled:  # pin the current key, not a replaced one, which may be stolen
        store.save_pinned_key(enrolled, pinned)
    written = out / CONFIG_NAME
    comment = (
        f"# Device {config.device} in federation {federation}; keys and certificates are those of {config.federation}."
    )
    body = text.partition("\n")[2] if text.startswith("# Agent of device ") else text
    replace_durably(written, f"{comment}\n{set_values(body, values)}".encode())
    fsync_path(out.parent)
    return written
