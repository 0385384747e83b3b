"""A coordinator's directory: where everything lies, its configuration, and the lock that keeps it to one process."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.config import CoordinatorConfig, load_config, render_config
from coordinator.errors import HomeError
from coordinator.pki.authority import CRL_NAME, create_ca, credential_of, issue, server_credential, write_revocations
from fedcg.files import PRIVATE, READABLE, replace_durably, write_durably
from fedcg.wire.messages.messages import COORDINATOR
from fedcg.wire.messages.signing import SigningKey

BROKER_NAME = "broker"
SECRET_BYTES = 32


@dataclass(frozen=True)
class Home:
    """The paths of a coordinator's directory; none is created by asking for it."""

    root: Path

    @property
    def config_file(self) -> Path:
        """coordinator.toml."""
        return self.root / "coordinator.toml"

    @property
    def pki(self) -> Path:
        """Certificates and keys of the mutual TLS."""
        return self.root / "pki"

    @property
    def revocations(self) -> Path:
        """The certificate revocation list."""
        return self.pki / CRL_NAME

    @property
    def signing_key(self) -> Path:
        """The Ed25519 key that signs the coordinator's messages."""
        return self.root / "signing.key"

    @property
    def secret_file(self) -> Path:
        """The root of the coordinator's random streams: at least 32 bytes."""
        return self.root / "coordinator.secret"

    @property
    def database(self) -> Path:
        """SQLite."""
        return self.root / "database.sqlite"

    @property
    def artifacts(self) -> Path:
        """Specs, updates, aggregates, server states; each named by its sha256."""
        return self.root / "artifacts"

    def public_data(self, config: CoordinatorConfig) -> Path | None:
        """Where the public images are, when the configuration names some; a relative path starts here."""
        named = config.aggregation.public_data
        return None if named is None else self.root / named

    @property
    def spill(self) -> Path:
        """Rows of teacher passes, per attempt."""
        return self.root / "spill"

    @property
    def broker(self) -> Path:
        """What a broker started by `fedcg broker run` uses."""
        return self.root / "broker"

    @property
    def events_file(self) -> Path:
        """The diary."""
        return self.root / "events.jsonl"

    @property
    def pid_file(self) -> Path:
        """Held locked by the running coordinator; tells its process id."""
        return self.root / "coordinator.pid"

    @contextmanager
    def changing_members(self) -> Iterator[None]:
        """Wait for, and hold, the right to change who may take part: database, revocation list and access list fit together."""
        descriptor = os.open(self.root / "members.lock", os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def require(self) -> Home:
        """This home, when it is one.

        Raises:
            HomeError: there is no coordinator in the directory.
        """
        if not self.config_file.is_file():
            raise HomeError(f"{self.root} is not a coordinator's directory; make one with `fedcg coordinator init`")
        return self

    def config(self) -> CoordinatorConfig:
        """The configuration, checked.

        Raises:
            ConfigError: names every error.
        """
        return load_config(self.config_file)

    def secret(self) -> bytes:
        """The root of the coordinator's random streams.

        Raises:
            HomeError: too short to be a secret.
        """
        secret = self.secret_file.read_bytes()
        if len(secret) < SECRET_BYTES:
            raise HomeError(f"{self.secret_file} holds {len(secret)} bytes; at least {SECRET_BYTES} are needed")
        return secret

    def locked(self) -> AbstractContextManager[None]:
        """Hold the home for this process.

        Raises:
            HomeError: another coordinator runs here.
        """
        return held(self.pid_file, "a coordinator")


@contextmanager
def held(path: Path, program: str) -> Iterator[None]:
    """Hold a file, which tells this process's id; the lock goes away with the process, however it ends.

    Raises:
        HomeError: another process holds it; names the program and the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.read(descriptor, 32).decode(errors="replace").strip()
            raise HomeError(f"{program} (process {other}) is using {path.parent}; stop it first") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def create_home(root: Path, config: CoordinatorConfig, *, observers: tuple[str, ...] = ()) -> Home:
    """Make a coordinator's directory: authority, certificates, signing key, secret, configuration.

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
    write_revocations(home.pki, ())
    server_credential(home.pki, BROKER_NAME, config.broker.host)
    for identity in (COORDINATOR, *observers):
        issue(home.pki, identity)
    SigningKey.generate().save(home.signing_key)
    write_durably(home.secret_file, secrets.token_bytes(SECRET_BYTES), is_new=True)
    for directory in (home.artifacts, home.spill, home.broker):
        directory.mkdir()
    replace_durably(home.config_file, render_config(config), READABLE)
    return home


def observers_of(home: Home) -> list[str]:
    """The observers that have a certificate here."""
    return sorted(
        path.stem for path in home.pki.glob("observer*.pem") if credential_of(home.pki, path.stem).key.is_file()
    )
