"""A small certificate authority for the broker's mutual TLS: P-256 keys, one certificate per identity, CN = identity.

Owns only files in the given directory: `ca.pem`, `ca.key`, `crl.pem`, `<name>.pem`, `<name>.key` (keys are 0600).
"""

import logging
import ssl
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.config import LOOPBACK_HOSTS
from coordinator.errors import HomeError
from coordinator.paths import CRL_NAME, Home, damaged
from fedcg.files import READABLE, replace_durably, write_durably
from fedcg.values import Value
from fedcg.wire.messages.envelopes import PRIVATE_PEM
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.tls import AUTHORITY_NAME, SET_CLOCK, ServerRole, clock_time
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles

CA_NAME = "ca"
CA_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=825)
RENEW_BEFORE = timedelta(days=60)
CLOCK_SLACK = timedelta(hours=1)
"""Devices without a battery-backed clock start with a date in the past; new certificates must already be valid then."""


log = logging.getLogger(__name__)


class Credential(Value):
    """The paths of a certificate and its private key."""

    certificate: Path
    key: Path


def create_ca(directory: Path, *, now: datetime | None = None) -> Credential:
    """Create a certificate authority in `directory`.

    Args:
        directory: created if missing; must not contain an authority.
        now: start of validity, for tests; default the current time.

    Raises:
        FileExistsError: an authority exists; replacing it would cut off every enrolled device.
    """
    directory.mkdir(parents=True, exist_ok=True)
    credential = credential_of(directory, CA_NAME)
    if credential.certificate.exists():
        raise FileExistsError(f"{credential.certificate} exists; a new authority would cut off every enrolled device")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY_NAME)])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(subject, subject, key.public_key(), (now or datetime.now(timezone.utc)) - CLOCK_SLACK, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(credential, certificate, key)
    return credential


def issue(
    directory: Path,
    common_name: str,
    *,
    server: bool = False,
    sans: Sequence[str] = ("127.0.0.1", "localhost"),
    now: datetime | None = None,
    life: timedelta = LEAF_LIFE,
    target: Path | None = None,
) -> Credential:
    """Issue a certificate with CN = `common_name` from the authority in `directory`, and its key.

    Args:
        directory: folder of the authority.
        common_name: the identity at the broker (device id, "coordinator", "observer"), or the role of a server.
        server: for server instead of client authentication.
        sans: addresses and host names of a server; ignored for clients.
        now: start of validity, for tests; default: the current time.
        life: how long it is valid.
        target: folder of the new files; default: that of the authority, with a validity from the authority's first day on.

    Raises:
        FileNotFoundError: there is no authority in `directory`.
        ValueError: the name is not valid as a file name.
    """
    if common_name == CA_NAME or "/" in common_name or common_name.startswith("."):
        raise ValueError(f"{common_name!r} can't be the name of a certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = certify(
        directory,
        common_name,
        key.public_key(),
        life,
        sans=sans if server else None,
        now=now,
        from_first_day=server or target is None,
    )
    credential = credential_of(target or directory, common_name)
    _write(credential, certificate, key)
    return credential


def server_credential(directory: Path, role: str, host: str) -> Credential:
    """A server's certificate; issued again if it expires soon, or if its names are not exactly those that clients use.

    It contains this machine's own names only if clients run on this machine. Otherwise any local program could impersonate the server.

    Args:
        directory: folder of the authority.
        role: the server's role (`fedcg.wire.tls`) and common name.
        host: the server's name or address for clients.
    """
    names = tuple(dict.fromkeys((host, "127.0.0.1", "localhost"))) if host in LOOPBACK_HOSTS else (host,)
    credential = credential_of(directory, role)
    if credential.certificate.exists() and credential.key.exists():
        authority, _ = _load_ca(directory)
        try:
            certificate, _ = _load(credential, authority)
        except HomeError as error:
            log.warning("%s. This is optional: a new pair is issued now", error)
            return issue(directory, role, server=True, sans=names)
        if _is_lasting(certificate) and _names(certificate) == set(names):
            return credential
    return issue(directory, role, server=True, sans=names)


def server_context(
    pki: Path, credential: Credential, client_certificate: ssl.VerifyMode = ssl.CERT_OPTIONAL
) -> ssl.SSLContext:
    """A TLS 1.3 context that verifies client certificates; the listener decides whether one is required.

    The handshake fails for certificates on the revocation list, as soon as they are on it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(credential_of(pki, CA_NAME).certificate)
    context.load_cert_chain(credential.certificate, credential.key)
    context.verify_mode = client_certificate
    _check_revocations(context, pki / CRL_NAME)
    return context


def renew_clients(home: Home) -> None:
    """Renew expiring certificates of the coordinator and of observers, each for its existing key."""
    authority, _ = _load_ca(home.pki)
    for name in (COORDINATOR, *observers_of(home)):
        own = credential_of(home.pki, name)
        certificate, key = _load(own, authority)
        if not _is_lasting(certificate):
            renewed = certify(home.pki, name, key.public_key(), LEAF_LIFE, from_first_day=True)
            replace_durably(own.certificate, renewed.public_bytes(serialization.Encoding.PEM), READABLE)
            log.info("%s renewed; valid until %s", own.certificate, clock_time(renewed.not_valid_after_utc))


def certify(
    directory: Path,
    common_name: str,
    key: ec.EllipticCurvePublicKey,
    life: timedelta,
    *,
    sans: Sequence[str] | None = None,
    now: datetime | None = None,
    from_first_day: bool = False,
) -> x509.Certificate:
    """Certify a public key, whose private key may be on another machine; nothing is written.

    Args:
        directory: folder of the authority.
        common_name: the device's id.
        key: a P-256 key.
        life: how long it is valid.
        sans: addresses and host names of a server; None for a client's certificate.
        now: start of validity; default: the current time.
        from_first_day: valid from the authority's first day on, so that a wrong clock can't cause a certificate that is not valid yet, or
            that has expired once the clock is right again.
    """
    ca_certificate, ca_key = _load_ca(directory, now)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if sans is None else ExtendedKeyUsageOID.SERVER_AUTH
    names = [x509.DNSName(common_name)] if sans is None else [_general_name(name) for name in sans]
    slack = min(CLOCK_SLACK, life / 10)
    start = (now or datetime.now(timezone.utc)) - slack
    if from_first_day:
        first = ca_certificate.not_valid_before_utc
        slack, start = slack + max(start - first, timedelta(0)), first
    return (
        _builder(subject, ca_certificate.subject, key, start, life + slack)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def write_revocations(directory: Path, serials: Iterable[tuple[int, datetime]], *, now: datetime | None = None) -> Path:
    """Replace the revocation list `crl.pem` of the authority atomically.

    Every list is at least a second newer than the previous one, because OpenSSL prefers the newer of two lists that it has read. A list
    never expires before the authority: with an expired list, a broker refuses all connections. It also does so with a list dated in
    the future. Lists are therefore dated by the clock minus the authority's life. While the authority is valid, even a wrong clock can't
    produce a date after the authority's first day.

    Args:
        directory: folder of the authority.
        serials: (serial number, time of revocation) of every revoked certificate.
        now: for tests; default: the current time.
    """
    now = now or datetime.now(timezone.utc)
    ca_certificate, ca_key = _load_ca(directory, now)
    path = directory / CRL_NAME
    start, number = now.replace(microsecond=0) - CA_LIFE, 1
    if path.exists():
        earlier = _load_revocations(path, ca_certificate)
        number = earlier.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number + 1
        if earlier.last_update_utc < now:
            start = max(start, earlier.last_update_utc + timedelta(seconds=1))
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca_certificate.subject)
        .last_update(start)
        .next_update(ca_certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    for serial, revoked_at in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(revoked_at).build()
        builder = builder.add_revoked_certificate(entry)
    replace_durably(path, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), READABLE)
    return path


def credential_of(directory: Path, name: str) -> Credential:
    """The paths of `name`'s certificate and key in `directory`; they need not exist."""
    return Credential(directory / f"{name}.pem", directory / f"{name}.key")


def broker_config(home: Home, identity: str, own: Credential, connection: str) -> MqttConfig:
    """A connection to the broker of coordinator.toml under an identity of the authority.

    Args:
        home: the home with coordinator.toml and authority.
        identity: the common name of `own`.
        own: certificate and key.
        connection: distinguishes the connections of one identity.
    """
    broker, tls = home.config().broker, TlsFiles(credential_of(home.pki, CA_NAME).certificate, own.certificate, own.key)
    return MqttConfig(broker.host, broker.port, identity, tls=tls, protocol=broker.protocol, connection=connection)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, start: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        address: IPv4Address | IPv6Address = ip_address(name)
    except ValueError:
        return x509.DNSName(name)
    return x509.IPAddress(address)


def _is_lasting(certificate: x509.Certificate) -> bool:
    """Whether it does not expire soon. All are valid from the authority's first day on, so "not valid yet" only means a wrong clock."""
    return datetime.now(timezone.utc) < certificate.not_valid_after_utc - RENEW_BEFORE


def _names(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    return found | set(names.get_values_for_type(x509.DNSName))


def _load_ca(directory: Path, now: datetime | None = None) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    credential = credential_of(directory, CA_NAME)
    if not credential.key.exists():
        raise FileNotFoundError(f"{credential.key} is missing: there is no certificate authority in {directory}")
    certificate, key = _load(credential)
    now, end = now or datetime.now(timezone.utc), certificate.not_valid_after_utc
    if now > end:
        raise HomeError(
            f"the authority in {credential.certificate} expired at {clock_time(end)}, and this machine's clock shows {clock_time(now)}: "
            f"{SET_CLOCK}. If the clock is right, create a new directory (`fedcg coordinator init`) and enrol every device again"
        )
    return certificate, key


def _load(
    credential: Credential, authority: x509.Certificate | None = None
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Load and check a pair: the certificate is signed by the authority (self-signed without one), and the key matches."""
    path, what = credential.certificate, "no certificate of this authority"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(authority or certificate)
        path, what = credential.key, "no private key"
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, FileNotFoundError) as error:
        raise damaged(path, f"it contains {what}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise damaged(path, f"it is not the key of {credential.certificate}")
    return certificate, key


def check_pki(directory: Path) -> None:
    """Check the authority in `directory`, its list, and all pairs except those of servers, which are issued again when needed.

    Raises:
        HomeError: one is damaged, or the authority has expired; names it and the next step.
    """
    authority, _ = _load_ca(directory)
    for path in sorted(directory.glob("*.pem")):
        if path.stem not in (*ServerRole, CA_NAME, Path(CRL_NAME).stem):
            _load(credential_of(directory, path.stem), authority)
    if (directory / CRL_NAME).exists():
        _load_revocations(directory / CRL_NAME, authority)


def _load_revocations(path: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        revocations = x509.load_pem_x509_crl(path.read_bytes())
        is_whole = revocations.is_signature_valid(key)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        is_whole = False
    if not is_whole:
        raise HomeError(
            f"{path} is damaged. Delete it: it is made again from the database, with every revoked certificate"
        )
    return revocations


def _write(credential: Credential, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    credential.key.unlink(missing_ok=True)
    write_durably(credential.key, key.private_bytes(*PRIVATE_PEM), is_new=True)
    credential.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def observers_of(home: Home) -> list[str]:
    """The observers with a certificate in this home."""
    return sorted(
        path.stem for path in home.pki.glob("observer*.pem") if credential_of(home.pki, path.stem).key.is_file()
    )


def _check_revocations(context: ssl.SSLContext, path: Path) -> None:
    """Refuse certificates on the revocation list, read from its file at each handshake; refuse all without a list."""
    read = -1

    def before_handshake(*_: object) -> int | None:
        nonlocal read
        try:
            if (changed := path.stat().st_mtime_ns) != read:
                context.load_verify_locations(path)  # adds the list: of two lists, OpenSSL uses the newer
                read = changed
        except OSError as error:
            if read:
                log.error("all connections are refused: the revocation list %s can't be read: %s", path, error)  # noqa: TRY400
            read = 0
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        return None

    context.load_verify_locations(path)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.num_tickets = 0  # a resumed session would present no certificate to check
    context.sni_callback = before_handshake
