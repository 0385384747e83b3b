"""A device's keys and certificate, and its broker connection with them.

Keys are created and stored on the device. A renewal uses a new key. A power cut never leaves a certificate without its key. `enrol` gets the
first certificate.
"""

from __future__ import annotations

import contextlib
import random
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from edge_client.config import AgentConfig, TlsSection
from edge_client.errors import ClockError, EnrolError
from edge_client.identity.enrolment_client import ask, check_clock, fetch_authority, trusting
from fedcg.errors import FAILED
from fedcg.event_log import EventLog
from fedcg.files import checked, fsync_path, is_passing, locked, replace_durably, with_check
from fedcg.values import Value
from fedcg.wire.errors import MalformedError, WireError
from fedcg.wire.messages import enrolment_messages
from fedcg.wire.messages.envelopes import PRIVATE_PEM, SigningKey, VerifyKey
from fedcg.wire.tls import SET_CLOCK
from fedcg.wire.transport.mqtt_config import MqttConfig, connection_name
from fedcg.worker_process import repeating

RENEW_AT = 1 / 3
"""A certificate is renewed when less than this fraction of its validity is left."""


class TlsKey(Value):
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
            EnrolError: the file contains no usable key.
        """
        try:
            private = serialization.load_pem_private_key(read_checked(path), password=None)
        except (ValueError, TypeError) as error:
            raise EnrolError(f"{path} can't be used: it contains no private key in PEM format") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise EnrolError(f"{path} contains no elliptic-curve key")
        return TlsKey(private)

    @property
    def digest(self) -> str:
        """The sha256 of the public half."""
        return enrolment_messages.key_digest(self.private.public_key())

    def pem(self) -> bytes:
        """The private key in PEM. Write it with mode 0600."""
        return self.private.private_bytes(*PRIVATE_PEM)

    def request(self, device: str) -> str:
        """A certificate request with CN = `device`, signed by this key, PEM."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, device)])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self.private, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()


def check_issued(certificate: str, authority: x509.Certificate, device: str, key: TlsKey) -> x509.Certificate:
    """Parse an issued certificate and check that it matches the request.

    Raises:
        EnrolError: it is for another name or key, or is not signed by the authority.
    """
    try:
        issued = enrolment_messages.load_certificate(certificate)
        issued.verify_directly_issued_by(authority)
        is_ours = (
            enrolment_messages.common_name(issued) == device
            and enrolment_messages.certificate_key_digest(issued) == key.digest
        )
    except (MalformedError, ValueError, TypeError, InvalidSignature) as error:
        raise EnrolError("the received certificate is not signed by the authority") from error
    if not is_ours:
        raise EnrolError(f"the received certificate is not for {device} and its key")
    return issued


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a file.

    Raises:
        EnrolError: the file contains no certificate, or can't be read.
    """
    try:
        return enrolment_messages.load_certificate(read_checked(path))
    except MalformedError as error:
        raise EnrolError(f"{path} can't be used: {error}") from error


def read_checked(path: Path) -> bytes:
    """The content of a file after verifying its checksum, if it has one.

    Raises:
        EnrolError: the file is damaged, or can't be read.
    """
    try:
        content = checked(path.read_bytes())
    except OSError as error:
        raise EnrolError(f"{path} can't be used: {error}", exit_code=FAILED if is_passing(error) else None) from error
    if content is None:
        raise EnrolError(f"{path} is damaged: restore it from a backup, or enrol the device again")
    return content


def is_due(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether less than a third of a certificate's validity is left."""
    return certificate.not_valid_after_utc - now < life_of(certificate) * RENEW_AT


def life_of(certificate: x509.Certificate) -> timedelta:
    """The duration of a certificate's validity."""
    return certificate.not_valid_after_utc - certificate.not_valid_before_utc


def replace_pair(certificate: Path, key: Path, new_certificate: bytes, new_key: bytes) -> None:
    """Replace certificate and key. After an interruption at any point, `settle_pair` restores either the old or the new pair."""
    replace_durably(pending(certificate), with_check(new_certificate))
    replace_durably(pending(key), with_check(new_key))
    settle_pair(certificate, key)


def settle_pair(certificate: Path, key: Path) -> None:
    """Finish or undo an interrupted replacement.

    The new certificate is written first and renamed last. So if a new certificate matches a key on disk, both are kept. If it matches none, its
    key was not written yet, and the certificate is deleted.
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
    """Path of the next certificate or key until it replaces `path`."""
    return path.with_name(f"{path.name}.next")


def _fit(certificate: Path, key: Path) -> bool:
    with contextlib.suppress(MalformedError, EnrolError):
        return enrolment_messages.certificate_key_digest(read_certificate(certificate)) == TlsKey.load(key).digest
    return False


class AgentKeys(Value):
    """This device's signing key, and the coordinator's public key."""

    signing: SigningKey
    coordinator: VerifyKey


def load_keys(config: AgentConfig) -> AgentKeys:
    """Load the keys named in the configuration.

    Raises:
        EnrolError: a key file is missing or invalid; names the file.
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
    """The broker settings: with keys for the agent's connection, without for another connection of the same device.

    Raises:
        EnrolError: names a TLS file that is damaged.
    """
    tls = None if config.tls is None else config.tls.files
    for path in (tls.ca, tls.cert, tls.key) if tls is not None else ():
        if path.exists():  # connecting reports missing files
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


LOOK_AGAIN = timedelta(hours=6)
"""Longest time between two checks, because a device's clock may jump."""
TRY_AGAIN = timedelta(hours=1)
TRIES_PER_LIFE = 50


def renew(config: AgentConfig, signing: SigningKey, clock: Callable[[], datetime] | None = None) -> x509.Certificate:
    """Get the next certificate, with a new key, and replace the current pair.

    Args:
        config: of the device.
        signing: its message key.
        clock: renew only if the certificate is due by this clock. Another federation's agent may just have renewed it.

    Returns:
        The certificate now in use.

    Raises:
        EnrolError: the message names the next step, and the current pair is kept. `ClockError` if the clocks differ too much.
        OSError: the new pair can't be written.
    """
    if config.tls is None or config.enrolment.url is None:
        raise EnrolError(
            f"agent.toml of {config.device} has no `url` under [enrolment]: ask the operator for a new bundle instead"
        )
    with _alone(config.tls):
        settle_pair(config.tls.cert, config.tls.key)
        if clock is not None and not is_due(current := read_certificate(config.tls.cert), clock()):
            return current
        authority, url = read_certificate(config.tls.ca), config.enrolment.url.rstrip("/")
        _, ahead_s = fetch_authority(url, enrolment_messages.certificate_key_digest(authority))
        check_clock(ahead_s, f"{SET_CLOCK.capitalize()}; the agent then renews the certificate when due")
        context = trusting(authority)
        try:
            context.load_cert_chain(config.tls.cert, config.tls.key)
        except (OSError, ssl.SSLError) as error:
            raise EnrolError(f"{config.tls.cert} and {config.tls.key} can't be used: {error}") from error
        key = TlsKey.generate()
        request = enrolment_messages.RenewRequest(
            device=config.device,
            request=key.request(config.device),
            proof=signing.sign(enrolment_messages.renewal_statement(config.device, key.digest)).hex(),
        )
        answer = ask(url, enrolment_messages.RENEW_PATH, request, enrolment_messages.RenewAnswer, context)
        certificate = check_issued(answer.certificate, authority, config.device, key)
        replace_pair(config.tls.cert, config.tls.key, certificate.public_bytes(Encoding.PEM), key.pem())
    return certificate


def settle(tls: TlsSection) -> None:
    """Finish or undo an interrupted replacement of certificate and key. Waits for a replacement in progress."""
    if any(tls.cert.parent.glob("*.next")):
        with _alone(tls):
            settle_pair(tls.cert, tls.key)


@dataclass(eq=False)
class Renewer:
    """Renews the certificate when due, on a separate thread of the running agent.

    Args:
        config: of the device.
        signing: its message key.
        events: the event log.
        renewed: called after every renewal, including one by another federation's agent; must only enqueue.
        clock: returns the current time, timezone-aware.
    """

    config: AgentConfig
    signing: SigningKey
    events: EventLog
    renewed: Callable[[], None]
    clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _serial: int | None = field(default=None, init=False)
    _is_clock_named: bool = field(default=False, init=False)

    def running(self) -> AbstractContextManager[None]:
        """Renew while the context is open. Does nothing without a renewal URL."""
        tls = self.config.tls
        if tls is None or self.config.enrolment.url is None:
            return nullcontext()
        return repeating("renewal", lambda: self._next(tls))

    def _next(self, tls: TlsSection) -> float:
        """Check once. Returns the seconds until the next check."""
        try:
            pause_s = self._look(tls).total_seconds()
            self._is_clock_named = False
        except (EnrolError, OSError) as error:
            pause_s = self._failed(tls, error).total_seconds()
        # jitter, so that devices enrolled together don't always renew together
        return pause_s * (0.9 + 0.2 * random.random())

    def _look(self, tls: TlsSection) -> timedelta:
        """Renew if due. Returns the time until the next check."""
        certificate = read_certificate(tls.cert)
        if self._serial is None:
            self._serial = certificate.serial_number
        if is_due(certificate, self.clock()):
            certificate = renew(self.config, self.signing, self.clock)
        if certificate.serial_number != self._serial:
            self._serial = certificate.serial_number
            self.events.write("certificate_renewed", until=certificate.not_valid_after_utc.timestamp())
            self.renewed()
        due_at = certificate.not_valid_after_utc - life_of(certificate) * RENEW_AT
        return max(timedelta(seconds=1), min(LOOK_AGAIN, due_at - self.clock()))

    def _failed(self, tls: TlsSection, error: Exception) -> timedelta:
        was_named, self._is_clock_named = self._is_clock_named, isinstance(error, ClockError)
        if not (was_named and self._is_clock_named):
            self.events.write("renewal_failed", detail=str(error))
        try:
            return min(TRY_AGAIN, life_of(read_certificate(tls.cert)) / TRIES_PER_LIFE)
        except (EnrolError, OSError):
            return TRY_AGAIN


def _alone(tls: TlsSection) -> AbstractContextManager[None]:
    """Hold the lock that prevents simultaneous renewals by a command and by agents."""
    return locked(tls.cert.with_name(".renewal.lock"))
