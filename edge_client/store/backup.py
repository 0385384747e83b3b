"""Backup and restore of a device: private store, identity and configuration in one encrypted file. Torch-free.

The file is a tar stream, encrypted with a passphrase (`fedcg.sealing`): `backup.json`, `agent.toml`, `identity/NAME`, `store/PATH`.
Images are not included.
"""

import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from pydantic import BaseModel

from edge_client.config import AgentConfig, load_config
from edge_client.errors import BackupError
from edge_client.store.generations import CHECKPOINT_FILE
from edge_client.store.private_store import CONTROL_FOLDER, PrivateStore
from fedcg.errors import EXISTS, NOT_FOUND
from fedcg.files import fsync_path, replace_durably, write_durably
from fedcg.sealing import FACTS_FILE, Seal, add_bytes, read_facts, sealed_archive, sealed_entries, without_accounts
from fedcg.wire.messages.schemas import Identifier

MAGIC = b"FEDCG-AGENT-BACKUP-1\n"
ENTRY = re.compile(r"agent\.toml|identity/(signing|coordinator|ca|cert|key)|store(/[A-Za-z0-9_][\w.-]{0,120}){1,6}")
_LEFT_OUT = {"lock", "trainer.lock", f"{CONTROL_FOLDER}/lock", CHECKPOINT_FILE}


class BackupFacts(BaseModel, frozen=True, extra="forbid", strict=True):
    """`backup.json`. `round` is the last trained round, 0 before the first."""

    federation: Identifier
    device: Identifier
    round: int
    made_at: float


def write_backup(
    config: AgentConfig, config_path: Path, store: PrivateStore, target: Path, passphrase: str
) -> BackupFacts:
    """Write a backup of a device whose agent does not run. The caller holds the store's locks.

    Raises:
        BackupError: the file exists, or a file of the identity is missing, so a restored machine could not act as this device.
        StoreError: the store has no intact generation, so a backup would be useless.
        OSError: the target disk is full.
    """
    identity = identity_files(config)
    if missing := [str(path) for path in identity.values() if not path.exists()]:
        raise BackupError(
            f"{', '.join(missing)} not found: the backup would lack this device's identity", exit_code=NOT_FOUND
        )
    generation, _ = store.generations.current()
    trained = 0 if generation is None else generation.round_attempt.round
    facts = BackupFacts(federation=config.federation, device=config.device, round=trained, made_at=time.time())
    with sealed_archive(target, Seal(MAGIC, passphrase, BackupError)) as archive:
        add_bytes(archive, FACTS_FILE, facts.model_dump_json().encode())
        add_bytes(archive, "agent.toml", config_path.read_bytes())
        for name, path in identity.items():
            add_bytes(archive, f"identity/{name}", path.read_bytes())
        for path in sorted(store.root.rglob("*")):
            name = path.relative_to(store.root).as_posix()
            if path.is_file() and name not in _LEFT_OUT and ENTRY.fullmatch(f"store/{name}"):
                archive.add(path, f"store/{name}", filter=without_accounts)
    return facts


def identity_files(config: AgentConfig) -> dict[str, Path]:
    """The files of this device's identity, by their name in a backup."""
    files = {"signing": config.keys.signing, "coordinator": config.keys.coordinator}
    if config.tls is not None:
        files |= {"ca": config.tls.ca, "cert": config.tls.cert, "key": config.tls.key}
    return files


def read_backup(
    source: Path, config_path: Path, passphrase: str, environment: Mapping[str, str]
) -> tuple[BackupFacts, AgentConfig]:
    """Restore a backup to the paths in its agent.toml, or in the existing one.

    The whole file is checked before anything is written. The store is created last, in one step.

    Raises:
        BackupError: wrong passphrase, damaged file, or a store or identity exists; nothing was overwritten.
        ConfigError: agent.toml can't be read.
    """
    seal = Seal(MAGIC, passphrase, BackupError)
    facts = read_facts(source, seal, BackupFacts, lambda name: ENTRY.fullmatch(name) is not None and ".." not in name)
    entries = (one for one in sealed_entries(source, seal) if one[0].name.startswith(("identity/", "agent.toml")))
    small = {entry.name.removeprefix("identity/"): seal.small(entry, content) for entry, content in entries}
    if (toml := small.pop("agent.toml", None)) is None:
        raise BackupError(f"{source} is not a backup of a device")
    config_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = config_path.with_name(f".{config_path.name}.restoring")
    write_durably(draft, config_path.read_bytes() if config_path.exists() else toml)
    try:
        config = load_config(draft, environment)
        if (config.federation, config.device) != (facts.federation, facts.device):
            raise BackupError(
                f"{config_path} is for device {config.device!r} of {config.federation!r}, but the backup is for {facts.device!r} of "
                f"{facts.federation!r}; nothing was written"
            )
        _restore(source, seal, config, small)
        if not config_path.exists():
            draft.replace(config_path)
            fsync_path(config_path.parent)
    finally:
        draft.unlink(missing_ok=True)
    config.store.with_name(f".{config.store.name}.restoring").rename(config.store)
    fsync_path(config.store.parent)
    return facts, config


def _restore(source: Path, seal: Seal, config: AgentConfig, identity: Mapping[str, bytes]) -> None:
    if config.store.exists() and (not config.store.is_dir() or any(config.store.iterdir())):
        raise BackupError(
            f"{config.store} exists and is not overwritten; move it away, or set another `store` in agent.toml",
            exit_code=EXISTS,
        )
    places = identity_files(config)
    for name, kept in identity.items():
        if places[name].exists() and places[name].read_bytes() != kept:
            raise BackupError(f"{places[name]} exists and differs; move it. Nothing was overwritten", exit_code=EXISTS)
    staging = config.store.with_name(f".{config.store.name}.restoring")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(mode=0o700, parents=True)
        for entry, content in sealed_entries(source, seal):
            if entry.name.startswith("store/"):
                _take(staging, entry.name.removeprefix("store/"), content)
        PrivateStore(staging).sum_gate.block()
        for name, data in identity.items():
            places[name].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not places[name].exists():
                replace_durably(places[name], data)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _take(root: Path, name: str, content: IO[bytes]) -> None:
    path = root / name
    for folder in reversed(Path(name).parents):
        (root / folder).mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        shutil.copyfileobj(content, file)
    fsync_path(path)
