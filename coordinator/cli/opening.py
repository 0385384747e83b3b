"""Creates a coordinator's directory (`fedcg coordinator init`) and changes where it stores its data."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from coordinator.broker.access_lists import refresh_access
from coordinator.config import CoordinatorConfig, StorageSettings, render_config
from coordinator.errors import ConfigError, HomeError
from coordinator.paths import BROKER_NAME, Home
from coordinator.pki.authority import create_ca, issue, server_credential
from fedcg.config_file import listed, problems_of
from fedcg.errors import EXISTS
from fedcg.files import READABLE, SECRET_BYTES, checked_secret, replace_durably, write_durably
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import COORDINATOR

HERE = ("sqlite", "directory")
"""Values of `fedcg coordinator restore` for storage in the coordinator's directory."""


def create_home(
    root: Path, config: CoordinatorConfig, *, observers: tuple[str, ...] = (), secret: bytes | None = None
) -> Home:
    """Create a coordinator's directory: authority, certificates, signing key, secret, configuration, empty database and access list.

    Args:
        root: a path that does not exist, or an empty directory.
        config: content of coordinator.toml.
        observers: identities that get a read-only certificate for all messages.
        secret: the root of its random streams, for reproducible runs; random by default.

    Raises:
        HomeError: the directory is not empty.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise HomeError(
            f"{root} is not an empty directory; choose another directory for the new coordinator", exit_code=EXISTS
        )
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    root.chmod(0o700)
    home = Home(root)
    create_ca(home.pki)
    server_credential(home.pki, BROKER_NAME, config.broker.host)
    for identity in (COORDINATOR, *observers):
        issue(home.pki, identity)
    SigningKey.generate().save(home.signing_key)
    write_durably(home.secret_file, checked_secret(secret or secrets.token_bytes(SECRET_BYTES)), is_new=True)
    home.make_folders()
    replace_durably(home.config_file, render_config(config), READABLE)
    refresh_access(home)
    return home


def change_storage(home: Home, places: Mapping[str, str | None]) -> None:
    """Change the location of database and artifacts in coordinator.toml. None leaves a location unchanged.

    Raises:
        ConfigError: a location is invalid; coordinator.toml is unchanged.
    """
    named = {name: None if place in HERE else place for name, place in places.items() if place is not None}
    if not named:
        return
    config = home.config()
    try:
        storage = StorageSettings.model_validate({**config.storage.model_dump(), **named})
    except ValidationError as error:
        raise ConfigError(listed("[storage]", problems_of(StorageSettings, error))) from error
    replace_durably(home.config_file, render_config(config.model_copy(update={"storage": storage})), READABLE)
