"""A coordinator's directory: its paths, its configuration, and the lock that reserves it for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from coordinator.config import CoordinatorConfig, load_config
from coordinator.errors import ConfigError, HomeError
from fedcg.errors import ALREADY_RUNNING, NOT_FOUND
from fedcg.files import PRIVATE, SECRET_BYTES, HeldError, is_locked, locked, secret_in
from fedcg.values import Value

BROKER_NAME = "broker"
CRL_NAME = "crl.pem"
HELD_S = 0.2
"""Time to wait for a lock: a command that checks it (`Home.is_held`) holds it for an instant."""


class _Path:
    """A path in a coordinator's directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, home: Home, _: type[Home]) -> Path:
        return home.root.joinpath(*self._parts)


class Home(Value):
    """The paths of a coordinator's directory. Reading them creates nothing.

    Attributes:
        config_file: coordinator.toml.
        pki: certificates and keys for mutual TLS; `revocations` is the certificate revocation list.
        signing_key: the Ed25519 key that signs the coordinator's messages.
        secret_file: the root of the coordinator's random streams: 32 bytes and their checksum.
        database: the SQLite database.
        high_water: a signed record of the database's progress (`storage.high_water`).
        artifacts: specs, updates, aggregates, server states; each named by its sha256.
        spill: rows of teacher passes, per attempt.
        broker: the folder of a broker started by `fedcg broker run`.
        events_file: the event log.
        audit_file: the audit log of all changes through the API or the page.
        api_token: the API token for commands on this machine.
        sessions: open sessions of the page, by digests of their cookies.
        pid_file: locked by the running coordinator; contains its process id.
    """

    root: Path
    config_file = _Path("coordinator.toml")
    pki = _Path("pki")
    revocations = _Path("pki", CRL_NAME)
    signing_key = _Path("signing.key")
    secret_file = _Path("coordinator.secret")
    database = _Path("database.sqlite")
    high_water = _Path("high-water.mark")
    artifacts = _Path("artifacts")
    spill = _Path("spill")
    broker = _Path("broker")
    events_file = _Path("events.jsonl")
    audit_file = _Path("audit.jsonl")
    api_token = _Path("api.token")
    sessions = _Path("sessions.json")
    pid_file = _Path("coordinator.pid")

    def public_data(self, config: CoordinatorConfig) -> Path | None:
        """The path of the public images if configured; a relative path starts in this directory."""
        named = config.aggregation.public_data
        return None if named is None else self.root / named

    def password(self, table: str, name: str | None) -> str:
        """The content of a file that coordinator.toml names in a table; a relative path starts in this directory. Empty without a name.

        Raises:
            ConfigError: it can't be read.
        """
        try:
            return "" if name is None else (self.root / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self.config_file}: the file {name} under [{table}] can't be read: {error}") from error

    def make_folders(self) -> None:
        """Create missing folders, since a copy of configuration and keys is a valid home."""
        for directory in (self.artifacts, self.spill, self.broker):
            directory.mkdir(exist_ok=True)

    def require(self) -> Home:
        """Return this home after checking that it is one.

        Raises:
            HomeError: the directory is not a coordinator's.
        """
        if not self.config_file.is_file():
            raise HomeError(
                f"{self.root} is not a coordinator's directory; create one with `fedcg coordinator init`",
                exit_code=NOT_FOUND,
            )
        return self

    def config(self) -> CoordinatorConfig:
        """The checked configuration.

        Raises:
            ConfigError: the file has errors; the message names all.
        """
        return load_config(self.config_file)

    def secret(self) -> bytes:
        """The root of the coordinator's random streams.

        Raises:
            HomeError: the file is damaged.
        """
        path = self.secret_file
        secret = secret_in(path.read_bytes())
        if secret is None:
            raise damaged(path, f"it does not contain a secret of {SECRET_BYTES} bytes with a valid checksum")
        return secret

    @property
    def is_held(self) -> bool:
        """Whether a coordinator is running here."""
        return is_locked(self.pid_file)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the home for this process.

        Raises:
            HomeError: another coordinator is running here.
        """
        return held(self.pid_file, "a coordinator")


def damaged(path: Path, why: str) -> HomeError:
    """The error for a damaged file that only a backup can restore."""
    return HomeError(
        f"{path} is damaged: {why}. Restore a backup (`fedcg coordinator restore FILE --dir NEW`) and copy the file "
        "from there"
    )


@contextmanager
def held(path: Path, program: str) -> Iterator[None]:
    """Lock a file that contains this process's id. The lock ends with the process in any case.

    Raises:
        HomeError: another process has locked it; the message names the program and the process.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, HELD_S, PRIVATE))
        except HeldError as error:
            raise HomeError(
                f"{program} (process {error}) is using {path.parent}; stop it first", exit_code=ALREADY_RUNNING
            ) from error
        yield
