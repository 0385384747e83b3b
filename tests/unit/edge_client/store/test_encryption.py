"""The private store encrypted at rest: what is on disk, wrong keys, the change from one form to another, and a kill in the middle of it."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_client.config import EncryptionSection, load_config
from edge_client.errors import DamagedFileError, StoreError, StoreKeyError
from edge_client.store import sealed_files, small_files
from edge_client.store.encryption import change_encryption, encryption_of, private_files
from edge_client.store.private_store import PrivateStore, open_store
from edge_client.store.sealed_files import MAGIC, StoreFiles, StoreKey, read_key
from edge_client.training.trainer_handle import Committed
from fedcg.files import replace_durably
from fedcg.wire.messages.messages import ArtifactRef, RoundAttempt
from fedcg.wire.transfer.chunk_sender import ChunkFile
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.filled_store import COHORT, MARK, contents, files_of, fill
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import DEVICE, FEDERATION, write_device


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A device with a filled store that is not encrypted, and a key file named in its agent.toml; returns that."""
    config = write_device(tmp_path / "box")
    fill(PrivateStore.open(tmp_path / "box" / "store", FEDERATION, DEVICE))
    config.write_text(config.read_text() + '[encryption]\nkey = "store.key"\n')
    return config


def command(config: Path, *words: object) -> tuple[int, str]:
    result = run_fedcg("agent", "store", *words, "--config", config)
    return result.exit_code, result.output + result.stderr


def contents_of(config: Path) -> dict[str, object]:
    return contents(open_store(load_config(config, {})))


def key_of(config: Path) -> StoreKey:
    return read_key(config.with_name("store.key"))


def test_an_encrypted_store_holds_no_private_byte_in_plain_text_and_reads_the_same(box: Path) -> None:
    root = box.parent / "store"
    plain = PrivateStore.open(root, FEDERATION, DEVICE)
    before, secret = contents(plain), plain.device_secret()
    weights = next(iter(plain.generations.load().slots["personal"].values()))  # type: ignore[union-attr]
    needles = [secret, COHORT, b"bar/0.png", MARK, *(array.tobytes() for array in weights.values() if array.size > 3)]
    assert all(any(needle in data for data in files_of(root).values()) for needle in needles)
    code, output = command(box, "encrypt")
    assert code == 0, output
    assert "Keep a copy of" in output
    after = files_of(root)
    assert not [name for name, data in after.items() for needle in needles if needle in data]
    assert all(path.read_bytes().startswith(MAGIC) for path in private_files(root))
    assert contents_of(box) == before
    assert {name for name in after if not after[name].startswith(MAGIC)} == {
        *("CURRENT", "events.jsonl", "format.json", "lock", "trainer.lock"),
        *(name for name in after if name.startswith("artifacts/")),
    }
    assert command(box, "decrypt")[0] == 0
    box.write_text(box.read_text().replace("[encryption]\n", "").replace('key = "store.key"\n', ""))
    assert contents_of(box) == before
    assert not [path for path in private_files(root) if path.read_bytes().startswith(MAGIC)]


def test_a_new_store_is_encrypted_from_its_first_file_where_a_key_is_set(tmp_path: Path) -> None:
    store = PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE, StoreKey(b"k" * 32))
    fill(store)
    assert all(path.read_bytes().startswith(MAGIC) for path in private_files(store.root))
    with pytest.raises(StoreKeyError, match="no key is set"):
        PrivateStore.open(store.root, FEDERATION, DEVICE)


@pytest.mark.parametrize("why", ["missing file", "no setting", "another key", "open to others", "no key"])
def test_without_its_key_a_store_is_refused_with_the_next_step_and_nothing_changes(box: Path, why: str) -> None:
    assert command(box, "encrypt")[0] == 0
    key, before = box.with_name("store.key"), files_of(box.parent / "store")
    expected = "under [encryption]"
    if why == "missing file":
        key.unlink()
        expected = "bring the file back"
    elif why == "no setting":
        box.write_text(box.read_text().replace('[encryption]\nkey = "store.key"\n', ""))
    elif why == "another key":
        key.write_text("ab" * 32)
    elif why == "open to others":
        key.chmod(0o644)
        expected = f"chmod 600 {key}"
    else:
        key.write_text("secret")
        expected = "64 hex digits"
    for words in (("status",), ("run",), ("store", "encrypt"), ("store", "rekey", "--new-key", box.with_name("new"))):
        result = run_fedcg("agent", *words, "--config", box)
        assert result.exit_code in (1, 2), words
        assert not isinstance(result.exception, StoreError), "the command explains it"
    status = run_fedcg("agent", "status", "--config", box)
    assert expected in status.stderr + status.output
    assert files_of(box.parent / "store") == before


def test_a_key_for_a_store_that_is_not_encrypted_is_refused(box: Path) -> None:
    box.with_name("store.key").write_text("ab" * 32)
    box.with_name("store.key").chmod(0o600)
    result = run_fedcg("agent", "status", "--config", box)
    assert result.exit_code == 1
    assert "run `fedcg agent store encrypt`" in result.stderr


def test_a_systemd_credential_is_the_key(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(box, "encrypt")[0] == 0
    credentials = box.parent / "credentials"
    credentials.mkdir()
    box.with_name("store.key").rename(credentials / "store.key")
    (credentials / "store.key").chmod(0o440)  # an access list of systemd shows as the group's bits
    box.write_text(box.read_text().replace('[encryption]\nkey = "store.key"\n', ""))
    assert run_fedcg("agent", "status", "--config", box).exit_code == 1
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert run_fedcg("agent", "status", "--config", box).exit_code == 0


class KilledError(BaseException):
    """Ends the work as a signal would."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Every replacement of a file is a step; the process is gone before one of them."""
    steps = itertools.count()

    def replaced(path: Path, data: bytes | str, mode: int = 0o600) -> None:
        if next(steps) == step:
            raise KilledError
        replace_durably(path, data, mode)

    monkeypatch.setattr(sealed_files, "replace_durably", replaced)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["encrypt", "decrypt", "rekey"])
def test_a_change_that_is_killed_at_any_step_loses_nothing_and_goes_on(
    box: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = contents(PrivateStore.open(box.parent / "store", FEDERATION, DEVICE))
    words: tuple[object, ...] = (change,)
    if change != "encrypt":
        assert command(box, "encrypt")[0] == 0
    if change == "rekey":
        words = ("rekey", "--new-key", box.with_name("new.key"))
    start, step = box.parent.with_name("start"), 0
    shutil.copytree(box.parent, start)
    while True:
        shutil.rmtree(box.parent)
        shutil.copytree(start, box.parent)
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            try:
                run_fedcg("agent", "store", *words, "--config", box, environment={})
                killed = False
            except KilledError:
                killed = True
        if not killed:
            break
        if change == "rekey" and step > 0:
            status = run_fedcg("agent", "status", "--config", box)
            assert "Run `fedcg agent store rekey` with the same --new-key again" in " ".join(status.stderr.split())
        elif change == "decrypt" or step > 0:  # readable with the key that is set, in the middle of the change
            assert contents_of(box) == before, step
        code, output = command(box, *words)
        assert code == 0, output
        check_done(box, change, before)
        step += 1
    assert step > 10


def check_done(config: Path, change: str, before: dict[str, object]) -> None:
    root = config.parent / "store"
    key = {"encrypt": "store.key", "decrypt": None, "rekey": "new.key"}[change]
    held = None if key is None else read_key(config.with_name(key))
    assert contents(PrivateStore.open(root, FEDERATION, DEVICE, held)) == before
    assert set(encryption_of(root).marks) == (set() if held is None else {held.mark.hex()})
    start = b"" if held is None else MAGIC + held.mark
    assert all(path.read_bytes().startswith(start) for path in private_files(root))
    if held is None:
        assert not any(path.read_bytes().startswith(MAGIC) for path in private_files(root))


def test_a_sealed_file_does_not_stand_in_for_another_and_a_plain_one_is_not_believed(box: Path) -> None:
    assert command(box, "encrypt")[0] == 0
    store = open_store(load_config(box, {}))
    seen = store.root / "seen.json"
    shutil.copyfile(store.root / "delivered.json", seen)
    with pytest.raises(DamagedFileError, match=r"seen\.json is damaged"):
        store.seen()
    seen.write_text('{"format": 1, "highest": [0, 0, 0]}')
    with pytest.raises(DamagedFileError, match=r"seen\.json is damaged"):
        store.seen()


def test_large_contents_of_several_frames_are_read_whole_in_pieces_and_by_range(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path, (StoreKey(b"k" * 32),))
    content = np.random.default_rng(1).bytes(3 * (1 << 20) + 17)
    files.replace(tmp_path / "update.bin", content)
    assert files.read(tmp_path / "update.bin") == content
    read = files.ranges(tmp_path / "update.bin")
    assert read is not None
    for offset, length in ((0, 10), ((1 << 20) - 5, 10), (2 << 20, 1 << 20), (len(content) - 3, 10), (0, len(content))):
        assert read(offset, length) == content[offset : offset + length]


def test_the_update_of_an_encrypted_store_is_sent_as_its_content(box: Path) -> None:
    assert command(box, "encrypt")[0] == 0
    store = open_store(load_config(box, {}))
    generation = store.generations.newest()
    assert generation is not None
    assert generation.outbox is not None
    ref = ArtifactRef(id=generation.outbox.artifact, size=generation.outbox.size, chunk_bytes=1024)
    assert ChunkFile(store.generations.update_path(generation), ref, store.files.ranges).data(0) == b"update"


def test_a_round_on_an_encrypted_store_ends_in_the_same_update(tmp_path: Path) -> None:
    plain, sealed = (Site(tmp_path / name, real_spec("fedcg", epochs=2)) for name in ("plain", "sealed"))
    shutil.rmtree(sealed.store.root / "generations")
    change_encryption(sealed.store.root, None, StoreKey(b"k" * 32))
    (tmp_path / "store.key").write_text((b"k" * 32).hex())
    (tmp_path / "store.key").chmod(0o600)
    key = EncryptionSection(key=tmp_path / "store.key")
    training = sealed.config.training.model_copy(update={"checkpoint_s": 1e-9})
    sealed.config = sealed.config.model_copy(update={"encryption": key, "training": training})
    sealed.store = open_store(sealed.config)
    for site in (plain, sealed):
        for number in (1, 2):
            assert site.trainer().do(site.round(number)) == Committed(RoundAttempt(number, 1))
    assert sealed.update() == plain.update()
    assert all(path.read_bytes().startswith(MAGIC) for path in private_files(sealed.store.root))


def test_the_agent_refuses_a_store_that_is_open_to_others_and_names_file_and_command(box: Path) -> None:
    box.write_text(box.read_text().replace('[encryption]\nkey = "store.key"\n', ""))
    root = box.parent / "store"
    opened = root / "generations" / "2" / "state.safetensors"
    opened.chmod(0o644)
    result = run_fedcg("agent", "run", "--config", box)
    assert result.exit_code == 1
    assert f"chmod go= {opened}" in " ".join(result.stderr.split())
    opened.chmod(0o600)
    root.chmod(0o755)
    result = run_fedcg("agent", "run", "--config", box)
    assert f"chmod go= {root}" in " ".join(result.stderr.split())


def test_another_user_does_not_change_the_form_of_a_store(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(box.parent)
    monkeypatch.setattr(os, "geteuid", lambda: box.stat().st_uid + 1)
    code, output = command(box, "encrypt")
    assert code == 2
    assert "run this as that user" in " ".join(output.split())
    assert files_of(box.parent) == before


def test_commands_for_scripts_report_what_they_did(box: Path) -> None:
    done = data_of(run_fedcg("agent", "store", "encrypt", "--config", box, "--json").stdout)
    assert done["files"] == len(list(private_files(box.parent / "store")))
    assert done["damaged"] == []
    assert small_files.read_json(StoreFiles(box.parent / "store"), box.parent / "store" / "format.json")["format"] == 2
