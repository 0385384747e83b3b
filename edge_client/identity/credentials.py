"""A device's own keys and certificate: made here, kept here, replaced so that no power cut leaves a certificate without its key.

Also its connection to the broker with them. Knows files and cryptography; not where a certificate comes from (`enrol`, `renewal`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError
from fedcg.errors import FAILED
from fedcg.files import checked, fsync_path, is_passing, replace_durably, with_check
from fedcg.wire.errors import MalformedError, WireError
from fedcg.wire.messages.enrolment_messages import certificate_key_digest, common_name, key_digest, load_certificate
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name

RENEW_AT = 1 / 3
"""A certificate is renewed when less than this part of its life is left."""


@dataclass(frozen=True)
class TlsKey:
    """A P-256 key that never leaves the device."""

    private: ec.EllipticCurvePrivateKey

    @staticmethod
    def generate() -> TlsKey:
        """A new key from the operating system's randomness."""
        return TlsKey(ec.generate_private_key(ec.SECP256R1()))

    @staticmethod
    def load(path: Path) -> TlsKey:
        """Read a key.

        Raises:
            EnrolError: the file holds none.
        """
        try:
            private = serialization.load_pem_private_key(read_checked(path), password=None)
        except (ValueError, TypeError) as error:
            raise EnrolError(f"{path} can't be used: it holds no private key in PEM form") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise EnrolError(f"{path} holds no elliptic-curve key")
        return TlsKey(private)

    @property
    def digest(self) -> str:
        """The sha256 of the public half."""
        return key_digest(self.private.public_key())

    def pem(self) -> bytes:
        """The private key, to be written with mode 0600."""
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def request(self, device: str) -> str:
        """A certificate request with CN = `device`, signed by this key, PEM."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, device)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self.private, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()


def check_issued(certificate: str, authority: x509.Certificate, device: str, key: TlsKey) -> x509.Certificate:
    """The certificate, when it answers the request.

    Raises:
        EnrolError: it is for another name or key, or not signed by the authority.
    """
    try:
        issued = load_certificate(certificate)
        issued.verify_directly_issued_by(authority)
        is_ours = common_name(issued) == device and certificate_key_digest(issued) == key.digest
    except (MalformedError, ValueError, TypeError, InvalidSignature) as error:
        raise EnrolError("the certificate that came is not signed by the authority") from error
    if not is_ours:
        raise EnrolError(f"the certificate that came is not for {device} and its key")
    return issued


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a file.

    Raises:
        EnrolError: the file holds none, or can't be read.
    """
    try:
        return load_certificate(read_checked(path))
    except MalformedError as error:
        raise EnrolError(f"{path} can't be used: {error}") from error


def read_checked(path: Path) -> bytes:
    """What is behind the check of a file, where it has one.

    Raises:
        EnrolError: it is damaged, or can't be read.
    """
    try:
        content = checked(path.read_bytes())
    except OSError as error:
        raise EnrolError(f"{path} can't be used: {error}", exit_code=FAILED if is_passing(error) else None) from error
    if content is None:
        raise EnrolError(f"{path} is damaged: restore it from a backup, or enrol the device again")
    return content


def is_due(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether less than a third of a certificate's life is left."""
    return certificate.not_valid_after_utc - now < life_of(certificate) * RENEW_AT


def life_of(certificate: x509.Certificate) -> timedelta:
    """From the first to the last moment at which a certificate is valid."""
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc


def replace_pair(certificate: Path, key: Path, new_certificate: bytes, new_key: bytes) -> None:
    """Replace certificate and key; killed at any point, `settle_pair` makes the old or the new pair whole."""
    replace_durably(pending(certificate), with_check(new_certificate))
    replace_durably(pending(key), with_check(new_key))
    settle_pair(certificate, key)


def settle_pair(certificate: Path, key: Path) -> None:
    """Finish, or undo, a replacement that was interrupted.

    The new certificate is written first and renamed last. So a new certificate that fits a key on disk is kept, with that
    key; one that fits none had no key yet and is deleted.
    """
    new_certificate, new_key = pending(certificate), pending(key)
    if not new_certificate.exists():
        new_key.unlink(missing_ok=True)
        return
    if new_key.exists() and _fit(new_certificate, new_key):
        new_key.replace(key)
        fsync_path(key.parent)
    if _fit(new_certificate, key):
        new_certificate.replace(certificate)
        fsync_path(certificate.parent)
    for left in (new_certificate, new_key):
        left.unlink(missing_ok=True)


def pending(path: Path) -> Path:
    """Where the next certificate or key lies until it takes the place of `path`."""
    return path.with_name(f"{path.name}.next")


def _fit(certificate: Path, key: Path) -> bool:
    with contextlib.suppress(MalformedError, EnrolError):
        return certificate_key_digest(read_certificate(certificate)) == TlsKey.load(key).digest
    return False


@dataclass(frozen=True)
class AgentKeys:
    """This device's signing key, and the coordinator's public key."""

    signing: SigningKey
    coordinator: VerifyKey


def load_keys(config: AgentConfig) -> AgentKeys:
    """The keys that the configuration names.

    Raises:
        EnrolError: names the file that is missing or holds no key.
    """
    try:
        signing = SigningKey.load(config.keys.signing)
        coordinator = VerifyKey.load_all(config.keys.coordinator)[0]
    except (OSError, ValueError, WireError) as error:
        raise EnrolError(
            f"the device's keys, {config.keys.signing} and {config.keys.coordinator}, can't be used: {error}. Enrol the device again "
            "(`fedcg enrol`), or copy its bundle again",
            exit_code=FAILED if is_passing(error) else None,
        ) from error
    return AgentKeys(signing, coordinator)


def mqtt_config(config: AgentConfig, keys: AgentKeys | None = None) -> MqttConfig:
    """How to reach the broker: with keys as the agent, without as another connection of the same device.

    Raises:
        EnrolError: names a TLS file that is damaged.
    """
    tls = None if config.tls is None else TlsFiles(config.tls.ca, config.tls.cert, config.tls.key)
    for path in (tls.ca, tls.cert, tls.key) if tls is not None else ():
        if path.exists():  # the connection names one that is missing
            read_checked(path)
    return MqttConfig(
        host=config.broker.host,
        port=config.broker.port,
        identity=config.device,
        connection="" if keys is None else connection_name(config.federation, keys.signing.public.raw),
        tls=tls,
        insecure=config.broker.insecure,
        protocol=config.broker.protocol,
        keepalive_s=config.broker.keepalive_s,
        max_packet=config.broker.limits.max_packet,
        in_flight=config.broker.limits.in_flight,
    )
