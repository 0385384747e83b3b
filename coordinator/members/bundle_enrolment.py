"""Enrols devices by bundle: everything that a device needs to join, in one directory that a person carries.

A bundle holds private keys. Devices that reach the coordinator enrol by token instead (`admission`) and keep their keys to themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.errors import EnrolmentError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, LEAF_LIFE, credential_of, issue
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.rounds.records import CertificateRecord, DeviceState
from coordinator.storage.store import Store
from fedcg.agent_config import CONFIG_NAME, render_agent_config
from fedcg.errors import EXISTS, NOT_FOUND
from fedcg.files import replace_durably, with_check
from fedcg.wire.messages.enrolment_messages import load_certificate
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.messages.topics import check_device_id


def enrol(
    home: Home, store: Store, ids: Sequence[str], out: Path, now: float, federation: str | None = None
) -> dict[str, Path]:
    """Make a bundle per device and register its public key.

    Args:
        home: the coordinator's directory.
        store: its database.
        ids: new devices.
        out: bundles go to `out/<id>`.
        now: unix time.
        federation: that their agent.toml names; None for the only one.

    Returns:
        Where each bundle is.

    Raises:
        EnrolmentError: an id that can't be used, is taken or named twice, or no federation to join; nothing was written.
    """
    return make_bundles(home, store, ids, out, now, federation_to_join(store, federation))


def make_bundles(
    home: Home, store: Store, ids: Sequence[str], out: Path, now: float, federation: str
) -> dict[str, Path]:
    """`enrol` for a federation that may be opened later.

    Raises:
        EnrolmentError: an id that can't be used, is taken or named twice; nothing was written.
    """
    _check(store, ids, out)
    coordinator = load_signing_identity(home, store).key.public
    for device in ids:
        key = _write_bundle(home, federation, device, coordinator, out / device)
        certificate = load_certificate((out / device / "tls" / "device.pem").read_bytes())
        store.add_device(device, key.hex, now, certificate_record(device, certificate, now))
    return {device: out / device for device in ids}


def federation_to_join(store: Store, named: str | None) -> str:
    """The federation that a new device's agent.toml names: the named one, or the only one.

    Raises:
        EnrolmentError: there is none, none of that name, or several and none was named.
    """
    there = [record.id for record in store.shown_federations()]
    if not there:
        raise EnrolmentError("there is no federation to join yet; open one with `fedcg federation create`")
    if named is None and len(there) > 1:
        raise EnrolmentError(f"name the federation with --federation; there are {', '.join(there)}")
    if named is not None and named not in there:
        raise EnrolmentError(f"there is no federation {named!r}; there are {', '.join(there)}", exit_code=NOT_FOUND)
    return named or there[0]


def problem_with_new(store: Store, device: str) -> str:
    """Why an id can't be given to a new device; empty when it can."""
    try:
        check_device_id(device)
    except ValueError as error:
        return str(error)
    known = store.device(device)
    if known is None:
        return ""
    was = "" if known.state is DeviceState.ENROLLED else f" (it is {known.state.value})"
    return (
        f"there is a device {device!r} already{was}; choose another id, or put a new device in its place: "
        f"`fedcg token create --replaces {device}`"
    )


def certificate_record(device: str, certificate: x509.Certificate, now: float) -> CertificateRecord:
    """The record of a certificate that was issued `now`."""
    return CertificateRecord(
        serial=f"{certificate.serial_number:x}",
        device=device,
        issued_at=now,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        revoked_at=None,
        pem=certificate.public_bytes(Encoding.PEM).decode(),
    )


def _check(store: Store, ids: Sequence[str], out: Path) -> None:
    problems = [f"{device!r} is named twice" for device in sorted(set(ids)) if ids.count(device) > 1]
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
    # Without an enrolment listener nothing can renew it
    life = LEAF_LIFE if config.enrolment_url is None else timedelta(days=config.enrolment.certificate_days)
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
        enrolment_url=config.enrolment_url,
        carrier_url=config.carrier_url,
    )
    (target / CONFIG_NAME).write_text(text, encoding="utf-8")
    return key.public
