"""A device's bundle: everything a box needs to join, in one directory. It holds private keys: carry it over a safe channel."""

from __future__ import annotations

import os
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

from coordinator.errors import EnrolmentError
from coordinator.home import Home
from coordinator.provision.pki import CA_NAME, credential_of, issue
from fedcg.wire.signing import SigningKey, VerifyKey

CONFIG_NAME = "agent.toml"


def make_bundle(home: Home, federation: str, device: str, out: Path) -> VerifyKey:
    """Write the bundle of a new device to `out/<device>`.

    Args:
        home: the coordinator that the device will work with.
        federation: what it joins.
        device: its id.
        out: parent directory.

    Returns:
        The device's public key, to be registered.

    Raises:
        EnrolmentError: there is a directory of that name already.
    """
    target = out / device
    if target.exists():
        raise EnrolmentError(f"{target} exists; remove it or choose another --out")
    tls = target / "tls"
    tls.mkdir(parents=True)
    target.chmod(0o700)
    credential = issue(home.pki, device)
    _move_private(credential.certificate, tls / "device.pem", 0o644)
    _move_private(credential.key, tls / "device.key", 0o600)
    shutil.copyfile(credential_of(home.pki, CA_NAME).certificate, tls / "ca.pem")
    key = SigningKey.generate()
    key.save(target / "signing.key")
    (target / "coordinator.pub").write_text(SigningKey.load(home.signing_key).public.hex + "\n", encoding="utf-8")
    (target / CONFIG_NAME).write_text(render_agent_config(home, federation, device), encoding="utf-8")
    return key.public


def render_agent_config(home: Home, federation: str, device: str) -> str:
    """The text of agent.toml."""
    broker = home.config().broker
    template = files("coordinator.provision").joinpath(f"{CONFIG_NAME}.template").read_text(encoding="utf-8")
    return Template(template).substitute(
        federation=federation, device=device, host=broker.host, port=broker.port, preset=broker.preset
    )


def _move_private(source: Path, target: Path, mode: int) -> None:
    """Move a file that only one side may keep, without a moment in which others can read it."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(source.read_bytes())
    source.unlink()
