"""A device that takes part in one federation joins another one of the same coordinator, with the same identity and a store of its own."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError
from edge_client.identity.keys import load_keys
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.config_file import set_values
from fedcg.errors import EXISTS
from fedcg.files import fsync_path, replace_durably
from fedcg.provision.agent_config import CONFIG_NAME
from fedcg.wire.messages.messages import Identifier

STORE = "store"


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
