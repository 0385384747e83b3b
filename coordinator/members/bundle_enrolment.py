"""Enrols devices by bundle, where a person carries the keys: all ids are checked before anything is written.

Boxes that reach the coordinator enrol by token instead (`admission`), and keep their keys to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.errors import EnrolmentError
from coordinator.members.bundle import make_bundle
from coordinator.paths import Home
from coordinator.pki.signing_keys import voice_of
from coordinator.rounds.records import CertificateRecord
from coordinator.storage.store import Store
from fedcg.wire.messages.enrolment_messages import load_certificate
from fedcg.wire.messages.topics import check_device_id


def enrol(home: Home, store: Store, ids: Sequence[str], out: Path, now: float) -> dict[str, Path]:
    """Make a bundle per device and register its public key.

    Args:
        home: the coordinator's directory.
        store: its database.
        ids: new devices.
        out: bundles go to `out/<id>`.
        now: unix time.

    Returns:
        Where each bundle is.

    Raises:
        EnrolmentError: an id that can't be used, is taken or named twice, or no federation to join; nothing was written.
    """
    federations = store.federations()
    if not federations:
        raise EnrolmentError("there is no federation to join yet; open one with `fedcg federation create`")
    _check(store, ids, out)
    key = voice_of(home, store).key.public
    bundles: dict[str, Path] = {}
    for device in ids:
        bundle = make_bundle(home, federations[0].id, device, key, out)
        store.add_device(
            device, bundle.key.hex, now, certificate_record(device, load_certificate(bundle.certificate), now)
        )
        bundles[device] = out / device
    return bundles


def certificate_record(device: str, certificate: x509.Certificate, now: float) -> CertificateRecord:
    """What is remembered of a certificate that was issued `now`."""
    return CertificateRecord(
        serial=f"{certificate.serial_number:x}",
        device=device,
        issued_at=now,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        revoked_at=None,
        pem=certificate.public_bytes(Encoding.PEM).decode(),
    )


def _check(store: Store, ids: Sequence[str], out: Path) -> None:
    problems: list[str] = []
    for device in ids:
        try:
            check_device_id(device)
        except ValueError as error:
            problems.append(str(error))
            continue
        if store.device(device) is not None:
            problems.append(f"there is a device {device!r} already; choose another id")
        if (out / device).exists():
            problems.append(f"{out / device} exists; remove it or choose another --out")
    problems += [f"{device!r} is named twice" for device in sorted(set(ids)) if ids.count(device) > 1]
    if problems:
        raise EnrolmentError("\n".join(problems))
