"""`fedcg coordinator backup` and `restore`: everything comes back, elsewhere too, and a file that is not whole or not ours writes nothing."""

import errno
import hashlib
import sqlite3
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from coordinator.broker.access_lists import refresh_access
from coordinator.cli.opening import create_home
from coordinator.config import CoordinatorConfig
from coordinator.paths import Home
from coordinator.rounds.records import UpdateRecord
from coordinator.storage import backup, schema
from coordinator.storage.database import PASSWORD_VARIABLE
from coordinator.storage.store import MAX_EPOCH_STEP, Store
from fedcg import sealing
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.sealing import add_bytes
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from tests.support.commands import data_of, fails, succeeds
from tests.support.coordinator.homes import add_federation, call
from tests.support.object_store import running_moto
from tests.support.postgres import PASSWORD, Cluster
from tests.support.raising import raising

PASSPHRASE = "correct horse battery"
UPDATE = b"an update" * 300_000  # several frames


@pytest.fixture(scope="module", autouse=True)
def quick_scrypt() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealing, "SCRYPT_N", 1 << 10)
        yield


@pytest.fixture
def words(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "passphrase"
    path.write_text(f"{PASSPHRASE}\n")
    return ("--passphrase-file", path)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A coordinator with two devices, in the middle of round 1: one update is stored."""
    made = create_home(tmp_path / "home", CoordinatorConfig())
    add_federation(made, "f", ("a", "b"))
    update = ArtifactStore(made.artifacts).put(UPDATE)
    with closing(Store.of(made)) as store:
        store.next_epoch()
        base = store.aggregates("f")[0].artifact
        store.open_attempt("f", RoundAttempt(1, 1), base, frozenset("ab"), 10.0, 110.0)
        store.end_update(UpdateRecord("f", 1, 1, "a", update, len(UPDATE), Outcome.ACCEPTED, "", "{}", 11.0, 12.0))
    refresh_access(made)
    return made


FULL = "database or disk is full"


def test_what_a_full_or_read_only_disk_refuses_names_the_file(
    home: Home, words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = ("coordinator", "backup", "--out", tmp_path / "out.backup", *words)
    with monkeypatch.context() as patched:
        patched.setattr(
            Store, "disable", raising(OperationalError("UPDATE devices", {}, sqlite3.OperationalError(FULL)))
        )
        patched.setattr(sealing.SealingWriter, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
        code, output = call("device", "disable", "a", "--dir", home.root)
        assert (code, output) == (1, f"Error: {home.database} can't be used: {FULL}. Free space on {home.root}\n")
        code, output = call(*making, "--dir", home.root)
        assert (code, output) == (1, f"Error: No space left on device: '{tmp_path / 'out.backup'}'\n")
    home.database.rename(tmp_path / "moved")
    home.database.mkdir()  # as unusable as on a read-only disk, for root too
    for command in (("federation", "list"), ("device", "list"), making):
        code, output = call(*command, "--dir", home.root)
        assert f"{home.database} can't be used: unable to open database file. Its disk may be full or read" in output
        assert (code, "[storage]" in output) == (1, False)


def content(home: Home) -> dict[str, object]:
    """Everything that a restored coordinator needs, but the epoch."""
    with closing(Store.of(home)) as store, store._engine.connect() as connection:
        tables = {
            source.name: sorted(map(repr, connection.execute(select(source)).all()))
            for source in schema.metadata.sorted_tables
            if source.name != "leases"
        }
    keys = {
        str(path.relative_to(home.root)): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in (*home.root.glob("*.key"), home.secret_file, *home.pki.iterdir())
        if path != home.revocations
    }
    return {**tables, **keys}


def epoch(home: Home) -> int:
    with closing(Store.of(home)) as store:
        return store.epoch()


def backed_up(home: Home, words: tuple[object, ...]) -> Path:
    file = home.root.parent / "backup"
    output = succeeds("coordinator", "backup", "--dir", home.root, "--out", file, *words, "--json")
    assert data_of(output)["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    return file


def restored(file: Path, root: Path, *words: object) -> Home:
    """The coordinator that a backup makes in a directory."""
    succeeds("coordinator", "restore", file, "--dir", root, *words)
    return Home(root)


def test_a_restored_home_has_all_and_a_higher_epoch(home: Home, tmp_path: Path, words: tuple[object, ...]) -> None:
    file = backed_up(home, words)
    assert home.secret() not in file.read_bytes()
    new = restored(file, tmp_path / "new", *words)
    assert content(new) == content(home)
    assert epoch(new) > epoch(home)
    assert set(ArtifactStore(new.artifacts).ids()) == set(ArtifactStore(home.artifacts).ids())
    assert ArtifactStore(new.artifacts).get(hashlib.sha256(UPDATE).hexdigest()) == UPDATE
    assert new.revocations.exists()
    assert new.config() == home.config()


def test_of_two_restored_coordinators_the_later_one_has_the_higher_epoch_whichever_backup_it_is_from(
    home: Home, tmp_path: Path, words: tuple[object, ...]
) -> None:
    early = backed_up(home, words)
    first = restored(early, tmp_path / "first", *words)
    with closing(Store.of(first)) as store:
        highest = [store.next_epoch() for _ in range(3)][-1]
    time.sleep(3 * MAX_EPOCH_STEP / 1000)  # no start takes less than a step's milliseconds
    late = tmp_path / "late"
    assert call("coordinator", "backup", "--dir", home.root, "--out", late, *words)[0] == 0
    for number, file in enumerate((late, early)):
        again = restored(file, tmp_path / f"again-{number}", *words)
        assert epoch(again) > highest
        highest = epoch(again)


def test_a_backup_of_sqlite_and_a_directory_is_restored_to_postgresql_and_s3_and_back(
    home: Home, tmp_path: Path, words: tuple[object, ...], postgres: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    file = backed_up(home, words)
    database = postgres.make_database().set(password=None).render_as_string()
    with running_moto(monkeypatch) as moto:
        places = ("--database", database, "--artifacts", moto.url)
        elsewhere = restored(file, tmp_path / "elsewhere", *places, *words)
        assert content(elsewhere) == content(home)
        assert moto.objects() == set(ArtifactStore(home.artifacts).ids())
        code, output = call("coordinator", "restore", file, "--dir", tmp_path / "x", *places, *words)
        assert (code, "is not empty" in output, list((tmp_path / "x").iterdir())) == (EXISTS, True, [])
        second = tmp_path / "second"
        assert call("coordinator", "backup", "--dir", elsewhere.root, "--out", second, *words)[0] == 0
        places = ("--database", "sqlite", "--artifacts", "directory")
        back = restored(second, tmp_path / "back", *places, *words)
    assert content(back) == content(home)
    assert set(ArtifactStore(back.artifacts).ids()) == set(ArtifactStore(home.artifacts).ids())
    assert epoch(back) > epoch(elsewhere)


def test_a_wrong_passphrase_and_a_file_that_is_not_whole_write_nothing(
    home: Home, tmp_path: Path, words: tuple[object, ...]
) -> None:
    file = backed_up(home, words)
    whole = file.read_bytes()
    frame = sealing.FRAME_BYTES + sealing.TAG_BYTES
    head = len(backup.MAGIC) + sealing.SALT_BYTES
    middle = head + frame + 100
    damaged = {
        "truncated in a frame": whole[:-1],
        "truncated between frames": whole[: head + frame],
        "a changed byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "frames in another order": whole[:head]
        + whole[head + frame : head + 2 * frame]
        + whole[head : head + frame]
        + whole[head + 2 * frame :],
        "something behind it": whole + b"\0",
        "no backup": b"something else",
        "empty": b"",
    }
    new = tmp_path / "new"
    for why, data in damaged.items():
        file.write_bytes(data)
        code, output = call("coordinator", "restore", file, "--dir", new, *words)
        assert (code, new.exists()) == (1, False), (why, output)
        assert str(file) in output, why
    file.write_bytes(whole)
    (tmp_path / "wrong").write_text("another passphrase")
    wrong = ("--passphrase-file", tmp_path / "wrong")
    assert "another passphrase was used for it" in fails(1, "coordinator", "restore", file, "--dir", new, *wrong)
    missing = ("coordinator", "restore", tmp_path / "none", "--dir", new, *words)
    assert "no such file or folder" in fails(NOT_FOUND, *missing)
    assert not new.exists()


def test_what_is_there_already_is_not_overwritten(home: Home, words: tuple[object, ...]) -> None:
    file = backed_up(home, words)
    assert "exists already" in fails(EXISTS, "coordinator", "backup", "--dir", home.root, "--out", file, *words)
    before = content(home)
    again = ("coordinator", "restore", file, "--dir", home.root, *words)
    assert "is not an empty directory" in fails(EXISTS, *again)
    assert content(home) == before


def test_a_short_passphrase_and_a_missing_file_are_bad_input(home: Home, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("1234567")
    for name, ends, why in (("short", BAD_INPUT, "at least 8"), ("none", NOT_FOUND, "can't be read")):
        words = ("--passphrase-file", tmp_path / name)
        assert why in fails(ends, "coordinator", "backup", "--dir", home.root, "--out", tmp_path / "b", *words)
    assert not (tmp_path / "b").exists()


def test_a_backup_into_a_folder_that_is_not_there_ends_with_a_sentence(home: Home, words: tuple[object, ...]) -> None:
    out = home.root.parent / "none" / "backup"
    code, output = call("coordinator", "backup", "--dir", home.root, "--out", out, *words)
    assert (code != 0, "none" in output, "Traceback" in output) == (True, True, False)


@pytest.mark.parametrize("place", ["sqlite", "postgresql"])
def test_a_backup_is_a_snapshot_while_the_coordinator_writes(
    place: str,
    home: Home,
    tmp_path: Path,
    words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Between two tables a round moves on; the backup holds the state before, in all tables."""
    if place == "postgresql":
        cluster: Cluster = request.getfixturevalue("postgres")
        monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
        database = cluster.make_database().set(password=None).render_as_string()
        home = restored(backed_up(home, words), tmp_path / "shared" / "home", "--database", database, *words)
    before = content(home)

    def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
        add_bytes(archive, name, data)
        if "-attempts-" in name:
            with closing(Store.of(home)) as store:
                store.start_distilling("f", RoundAttempt(1, 1), 20.0)
                store.weigh("f", RoundAttempt(1, 1), {"a": 5})

    monkeypatch.setattr(backup, "add_bytes", add)
    file = backed_up(home, words)
    assert content(home) != before
    assert content(restored(file, tmp_path / "new", "--database", "sqlite", *words)) == before
