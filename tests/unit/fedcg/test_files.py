"""Durable files: whole or not at all, whoever dies, and one place that does it."""

import errno
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedcg.files import PRIVATE, READABLE, checked, file_sha256, replace_durably, with_check, write_durably
from tests.support.raising import raising

PACKAGES = ("fedcg", "edge_client", "coordinator", "export", "devices", "audit", "experiments")


def test_a_replaced_file_has_the_new_content_and_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    path.write_text("old")
    replace_durably(path, "new ü")
    assert path.read_bytes() == "new ü".encode()
    assert stat.S_IMODE(path.stat().st_mode) == PRIVATE
    replace_durably(path, b"newer", READABLE)
    assert stat.S_IMODE(path.stat().st_mode) == READABLE
    assert [entry.name for entry in tmp_path.iterdir()] == ["seen.json"]


@pytest.mark.parametrize("call", ["fsync", "fchmod"])
def test_a_full_disk_leaves_only_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "seen.json"
    path.write_text("old")

    monkeypatch.setattr(os, call, raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        replace_durably(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["seen.json"]


def test_content_is_synced_before_a_rename_and_the_name_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "seen.json"
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        order.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        order.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    replace_durably(path, "new")
    assert order == ["content", "name", "directory"]


def test_several_threads_that_replace_one_file_at_once_leave_one_of_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    contents = [letter * 100_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: replace_durably(path, content), contents * 4))
    assert path.read_text() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["curves.csv"]


def test_a_new_file_never_replaces_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    write_durably(path, b"key", is_new=True)
    with pytest.raises(FileExistsError):
        write_durably(path, b"other", is_new=True)
    assert path.read_bytes() == b"key"
    assert stat.S_IMODE(path.stat().st_mode) == PRIVATE


def test_a_file_of_another_program_that_begins_with_a_comment_is_whole_and_a_damaged_check_is_none() -> None:
    pem = b"-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"
    for comment in (b"# Issuer: CN=Somebody\n", b"##\n## Bundle of CA Root Certificates\n", b""):
        assert checked(comment + pem) == comment + pem
    own = with_check(pem)
    assert checked(own) == pem
    for at in range(len(own)):
        assert checked(own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :]) is None, at


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1


def test_no_other_module_writes_durably_on_its_own() -> None:
    root = Path(__file__).parents[3]
    own = {
        str(file.relative_to(root))
        for package in PACKAGES
        for file in (root / package).rglob("*.py")
        if "fsync(" in file.read_text() or "mkstemp(" in file.read_text()
    }
    assert own == {"fedcg/files.py"}


def test_a_process_killed_while_it_rewrites_a_file_leaves_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    replace_durably(path, "a" * 200_000)
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", REWRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            writer.send_signal(signal.SIGKILL)
        assert path.read_text() in ("a" * 200_000, "b" * 200_000)


REWRITER = """
import sys
from pathlib import Path
from fedcg.files import replace_durably
path = Path(sys.argv[1])
print("ready", flush=True)
while True:
    for letter in "ab":
        replace_durably(path, letter * 200_000)
"""
