"""Backup and restore of a coordinator: database, kept artifacts, keys and configuration in one encrypted file.

The file is a tar stream: `backup.json`, the tables as lines of JSON, the files of the home, the artifacts.
"""

import json
import re
import shutil
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel
from sqlalchemy import Connection, Engine, column, func, insert, inspect, select, table, text
from sqlalchemy.exc import DBAPIError

from coordinator.errors import StoreError
from coordinator.paths import Home
from coordinator.storage import database, schema
from coordinator.storage.artifacts import artifacts_of
from coordinator.storage.migrations import SCHEMA_VERSION, upgrade
from fedcg.errors import EXISTS
from fedcg.files import PRIVATE, READABLE, file_sha256, replace_durably
from fedcg.sealing import FACTS_FILE, Seal, add_bytes, read_facts, sealed_archive, sealed_entries, without_accounts
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.schemas import Outcome

MAGIC = b"FEDCG-BACKUP-1\n"
ROWS = 500
HOME_FILES = ("coordinator.toml", "coordinator.secret", "signing*.key", "pki/*")
FILE_ENTRY = re.compile(
    r"home/(coordinator\.toml|coordinator\.secret|signing(-\d{1,9})?\.key|pki/[A-Za-z0-9][\w.-]{0,120})"
)
TABLE_ENTRY = re.compile(r"tables/(\d{4})-([a-z_]{1,40})-\d{6}\.jsonl")
ARTIFACT_ENTRY = re.compile(r"artifacts/([0-9a-f]{64})")
MAX_SMALL_BYTES = 64 << 20  # largest entry read into memory: ROWS rows, or a file of the home


class BackupFacts(BaseModel, frozen=True, extra="forbid", strict=True):
    """`backup.json`."""

    schema_version: int
    made_at: float
    artifacts: int


def write_backup(home: Home, target: Path, passphrase: str) -> BackupFacts:
    """Write a backup; the coordinator may be running.

    Args:
        home: the coordinator's.
        target: the file; must not exist.
        passphrase: encrypts the backup.

    Raises:
        StoreError: the file exists, the database can't be used, or rounds were closed and pruned before their artifacts were read.
        OSError: the file's disk is full.
    """
    with database.explained(home), ExitStack() as opened:
        engine = database.open_database(database.database_of(home))
        opened.callback(engine.dispose)
        database.HighWater(home, engine).check()
        with sealed_archive(target, Seal(MAGIC, passphrase, StoreError)) as archive:
            return _write_all(archive, home, engine)


def read_backup(source: Path, home: Home, passphrase: str, configure: Callable[[Home], None]) -> int:
    """Check a backup completely, then write its content into an empty home and an empty database.

    Args:
        source: the file.
        home: its directory is missing or empty.
        passphrase: passphrase of the backup.
        configure: changes the restored coordinator.toml, before the database is opened.

    Returns:
        The epoch from which the restored coordinator continues.

    Raises:
        StoreError: a wrong passphrase, a damaged file, a directory or a database that is not empty; nothing was written.
    """
    if home.root.exists() and (not home.root.is_dir() or any(home.root.iterdir())):
        raise StoreError(
            f"{home.root} is not an empty directory; choose another one for the restored coordinator", exit_code=EXISTS
        )
    seal = Seal(MAGIC, passphrase, StoreError, MAX_SMALL_BYTES)
    facts = _checked(source, seal)
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.root.chmod(0o700)
    try:
        return _restore(source, home, seal, configure, facts)
    except BaseException:
        for path in home.root.iterdir():  # the database's transaction was rolled back
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _restore(source: Path, home: Home, seal: Seal, configure: Callable[[Home], None], facts: BackupFacts) -> int:
    home.pki.mkdir(mode=0o700)
    for entry, content in sealed_entries(source, seal):
        if FILE_ENTRY.fullmatch(entry.name):
            mode = READABLE if entry.mode & 0o004 else PRIVATE
            replace_durably(home.root / entry.name.removeprefix("home/"), seal.small(entry, content), mode)
    configure(home)
    home.make_folders()
    artifacts, place = artifacts_of(home), database.database_of(home)
    engine = database.make_engine(place)
    try:
        with engine.begin() as connection:
            epoch = _restore_rows(connection, source, seal, facts, database.name_of(place))
            for entry, content in sealed_entries(source, seal):
                if found := ARTIFACT_ENTRY.fullmatch(entry.name):
                    _take_artifact(artifacts, found.group(1), content)
    except DBAPIError as error:
        raise database.unusable(place, error) from error
    finally:
        engine.dispose()
    engine = database.open_database(place)
    database.HighWater(home, engine).lift()
    engine.dispose()
    return epoch


# Writing


def _write_all(archive: tarfile.TarFile, home: Home, engine: Engine) -> BackupFacts:
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execution_options(isolation_level="REPEATABLE READ")
        connection.exec_driver_sql("BEGIN" if engine.dialect.name == "sqlite" else "SELECT 1")
        kept, needed = _kept_artifacts(connection, home.config().storage.keep_rounds)
        facts = BackupFacts(schema_version=SCHEMA_VERSION, made_at=time.time(), artifacts=len(kept))
        add_bytes(archive, FACTS_FILE, facts.model_dump_json().encode())
        without = (schema.events, schema.used_keys)  # a restored coordinator does not need these
        for number, source in enumerate(one for one in schema.metadata.sorted_tables if one not in without):
            rows = connection.execute(select(source).execution_options(yield_per=ROWS)).mappings()
            for part, page in enumerate(rows.partitions(ROWS)):
                lines = "".join(f"{json.dumps(dict(row))}\n" for row in page)
                add_bytes(archive, f"tables/{number:04}-{source.name}-{part:06}.jsonl", lines.encode())
    for pattern in HOME_FILES:
        for path in sorted(home.root.glob(pattern)):
            archive.add(path, f"home/{path.relative_to(home.root)}", filter=without_accounts)
    artifacts = artifacts_of(home)
    for artifact in sorted(kept):
        if not _add_artifact(archive, artifacts, artifact) and artifact in needed:
            raise StoreError("rounds were closed while their artifacts were read; run the backup again")
    return facts


def _add_artifact(archive: tarfile.TarFile, artifacts: ArtifactStore, artifact: str) -> bool:
    """Add an artifact; return whether it still existed, since pruning may delete those of old rounds."""
    try:
        archive.add(artifacts.local(artifact), f"artifacts/{artifact}", filter=without_accounts)
    except FileNotFoundError:
        return False
    return True


def _kept_artifacts(connection: Connection, keep_rounds: int) -> tuple[set[str], set[str]]:
    """The artifacts that pruning keeps, and those of them that the open round needs."""
    kept: set[str] = set()
    needed: set[str] = set()
    updates, aggregates, federations = schema.updates.c, schema.aggregates.c, schema.federations.c
    for federation, spec in connection.execute(select(federations.id, federations.spec)).all():
        last = connection.execute(
            select(func.max(aggregates.round)).where(aggregates.federation == federation)
        ).scalar_one()
        for first, found in ((last - keep_rounds, kept), (last, needed)):
            merged = (aggregates.federation == federation, aggregates.round >= first)
            made = select(aggregates.artifact, aggregates.server_state).where(*merged)
            sent = select(updates.artifact).where(updates.federation == federation, updates.round > first)
            found.add(spec)
            found.update(name for row in connection.execute(made) for name in row)
            found.update(connection.execute(sent.where(updates.outcome == Outcome.ACCEPTED.value)).scalars())
    kept.update(connection.execute(select(aggregates.artifact).where(aggregates.pinned.is_not(None))).scalars())
    return kept, needed


# Reading


def _checked(source: Path, seal: Seal) -> BackupFacts:
    """Read the whole file and check each name in it."""
    kinds = (FILE_ENTRY, TABLE_ENTRY, ARTIFACT_ENTRY)
    facts = read_facts(source, seal, BackupFacts, lambda name: any(kind.fullmatch(name) for kind in kinds))
    if not 1 <= facts.schema_version <= SCHEMA_VERSION:
        raise StoreError(
            f"{source} has schema version {facts.schema_version}, but this program reads up to version {SCHEMA_VERSION}. Use the "
            "program that wrote it"
        )
    return facts


def _restore_rows(connection: Connection, source: Path, seal: Seal, facts: BackupFacts, name: str) -> int:
    """Create the tables of the backup's version and fill them; return the new epoch."""
    if inspect(connection).get_table_names():
        raise StoreError(f"{name} is not empty; name another database for the restored coordinator", exit_code=EXISTS)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    upgrade(connection, facts.schema_version)
    for entry, content in sealed_entries(source, seal):
        if (found := TABLE_ENTRY.fullmatch(entry.name)) is None:
            continue
        rows: list[dict[str, Any]] = [json.loads(line) for line in seal.small(entry, content).splitlines()]
        filled = table(found.group(2), *(column(field) for field in rows[0]))
        connection.execute(insert(filled), rows)
    epoch = database.recovered_epoch(
        int(connection.execute(text("SELECT coalesce(max(epoch), 0) FROM leases")).scalar_one())
    )
    connection.execute(text("DELETE FROM leases"))
    connection.execute(text("INSERT INTO leases (id, epoch) VALUES (1, :epoch)"), {"epoch": epoch})
    return epoch


def _take_artifact(artifacts: ArtifactStore, artifact: str, content: IO[bytes]) -> None:
    received = artifacts.root / f".restored-{artifact}"
    with received.open("wb") as file:
        shutil.copyfileobj(content, file)
    if file_sha256(received) != artifact:
        received.unlink()
        raise StoreError(f"artifact {artifact} in the backup is damaged")
    artifacts.adopt(received, artifact)
