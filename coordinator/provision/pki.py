"""A small certificate authority for the broker's mutual TLS: P-256 keys, one certificate per identity, CN = identity.

Owns nothing but files in the directory it is given: `ca.pem`, `ca.key`, `<name>.pem`, `<name>.key` (keys are 0600).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_NAME = "ca"
CA_DAYS = 3650
LEAF_DAYS = 825
CLOCK_SLACK = timedelta(hours=1)
"""Boxes without a battery-backed clock boot in the past; a fresh certificate must already be valid for them."""


@dataclass(frozen=True)
class Credential:
    """Where a certificate and its private key lie."""

    certificate: Path
    key: Path


def create_ca(directory: Path, *, now: datetime | None = None) -> Credential:
    """Make a certificate authority in `directory`.

    Args:
        directory: created when missing; must not hold an authority already.
        now: start of validity, for tests; default the current time.

    Raises:
        FileExistsError: there is an authority already; replacing it would cut off every enrolled device.
    """
    directory.mkdir(parents=True, exist_ok=True)
    credential = credential_of(directory, CA_NAME)
    if credential.certificate.exists():
        raise FileExistsError(f"{credential.certificate} exists; a new authority would cut off every enrolled device")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedCG Edge CA")])
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
        _builder(subject, subject, key.public_key(), _start(now), CA_DAYS)
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
) -> Credential:
    """Issue a certificate with CN = `common_name` from the authority in `directory`, and its key.

    Args:
        directory: holds the authority; the new files go there too.
        common_name: the identity that the broker sees (device id, "coordinator", "observer", or the broker itself).
        server: for the broker (server authentication) instead of for a client.
        sans: addresses and host names that a server answers under; not used for clients.
        now: start of validity, for tests; default the current time.

    Raises:
        FileNotFoundError: there is no authority in `directory`.
        ValueError: the name is not usable as a file name.
    """
    if common_name == CA_NAME or "/" in common_name or common_name.startswith("."):
        raise ValueError(f"{common_name!r} can't be the name of a certificate")
    ca_certificate, ca_key = _load_ca(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    names = [_general_name(name) for name in sans] if server else [x509.DNSName(common_name)]
    certificate = (
        _builder(subject, ca_certificate.subject, key.public_key(), _start(now), LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    credential = credential_of(directory, common_name)
    _write(credential, certificate, key)
    return credential


def credential_of(directory: Path, name: str) -> Credential:
    """The paths under which `name`'s certificate and key lie in `directory`, whether or not they exist."""
    return Credential(directory / f"{name}.pem", directory / f"{name}.key")


def _start(now: datetime | None) -> datetime:
    return (now or datetime.now(timezone.utc)) - CLOCK_SLACK


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, start: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        address: IPv4Address | IPv6Address = ip_address(name)
    except ValueError:
        return x509.DNSName(name)
    return x509.IPAddress(address)


def _load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    credential = credential_of(directory, CA_NAME)
    if not credential.key.exists():
        raise FileNotFoundError(f"{credential.key} is missing: there is no certificate authority in {directory}")
    key = serialization.load_pem_private_key(credential.key.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{credential.key} is not an elliptic-curve key")  # noqa: TRY004 - bad content, not a wrong type
    return x509.load_pem_x509_certificate(credential.certificate.read_bytes()), key


def _write(credential: Credential, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    credential.key.unlink(missing_ok=True)
    descriptor = os.open(credential.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(encoded)
    credential.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
