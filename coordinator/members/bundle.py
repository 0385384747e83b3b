"""A device's bundle: everything a box needs to join, in one directory. It holds private keys: carry it over a safe channel."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import EnrolmentError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, LEAF_LIFE, credential_of, issue_beside
from fedcg.provision.agent_config import CONFIG_NAME, render_agent_config
from fedcg.wire.messages.signing import SigningKey, VerifyKey


@dataclass(frozen=True)
class Bundle:
    """What the coordinator has to remember of a bundle: the public key, and the certificate (PEM)."""

    key: VerifyKey
    certificate: bytes


def make_bundle(home: Home, federation: str, device: str, coordinator: VerifyKey, out: Path) -> Bundle:
    """Write the bundle of a new device to `out/<device>`.

    Args:
        home: the coordinator that the device will work with.
        federation: what it joins.
        device: its id.
        coordinator: the coordinator's message key.
        out: parent directory.

    Returns:
        What is to be registered.

    Raises:
        EnrolmentError: there is a directory of that name already.
    """
    target = out / device
    if target.exists():
        raise EnrolmentError(f"{target} exists; remove it or choose another --out")
    tls = target / "tls"
    tls.mkdir(parents=True)
    target.chmod(0o700)
    own = issue_beside(home.pki, tls, device, LEAF_LIFE)
    own.certificate.rename(tls / "device.pem")
    own.key.rename(tls / "device.key")
    shutil.copyfile(credential_of(home.pki, CA_NAME).certificate, tls / "ca.pem")
    key = SigningKey.generate()
    key.save(target / "signing.key")
    (target / "coordinator.pub").write_text(coordinator.hex + "\n", encoding="utf-8")
    config = home.config()
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
    return Bundle(key.public, (tls / "device.pem").read_bytes())
