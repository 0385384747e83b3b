"""Makes a coordinator's home: what `fedcg coordinator init` does."""

from __future__ import annotations

import secrets
from pathlib import Path

from coordinator.broker.access_lists import refresh_access
from coordinator.config import CoordinatorConfig, render_config
from coordinator.errors import HomeError
from coordinator.paths import BROKER_NAME, SECRET_BYTES, Home
from coordinator.pki.authority import create_ca, issue, server_credential
from fedcg.files import READABLE, replace_durably, write_durably
from fedcg.wire.messages.messages import COORDINATOR
from fedcg.wire.messages.signing import SigningKey


def create_home(root: Path, config: CoordinatorConfig, *, observers: tuple[str, ...] = ()) -> Home:
    """Make a coordinator's directory: authority, certificates, signing key, secret, configuration, empty database and access list.

    Args:
        root: must be missing or empty.
        config: what goes into coordinator.toml.
        observers: identities that get a certificate to read everything and write nothing.

    Raises:
        HomeError: the directory holds something.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise HomeError(f"{root} is not an empty directory; choose another one for the new coordinator")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    root.chmod(0o700)
    home = Home(root)
    create_ca(home.pki)
    server_credential(home.pki, BROKER_NAME, config.broker.host)
    for identity in (COORDINATOR, *observers):
        issue(home.pki, identity)
    SigningKey.generate().save(home.signing_key)
    write_durably(home.secret_file, secrets.token_bytes(SECRET_BYTES), is_new=True)
    for directory in (home.artifacts, home.spill, home.broker):
        directory.mkdir()
    replace_durably(home.config_file, render_config(config), READABLE)
    refresh_access(home)
    return home
