"""Backup and restore of a device: one encrypted file, for a box that replaces this one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.config import load_config
from edge_client.store import backup
from edge_client.store.private_store import PrivateStore, open_store
from fedcg import sealing
from fedcg.errors import ALREADY_RUNNING, BAD_INPUT, EXISTS
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.filled_store import contents, files_of, fill
from tests.support.edge.world import DEVICE, FEDERATION, write_device

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def quick_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "SCRYPT_N", 1 << 10)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    config = write_device(tmp_path / "box")
    (tmp_path / "passphrase").write_text(PASSPHRASE + "\n")
    fill(PrivateStore.open(tmp_path / "box" / "store", FEDERATION, DEVICE))
    return config


def run(*words: object, root: Path) -> tuple[int, str]:
    result = run_fedcg("agent", *words, "--passphrase-file", root / "passphrase")
    return result.exit_code, " ".join((result.output + result.stderr).split())


def failure_of(*words: object, root: Path) -> str:
    """The next step that a failing command names."""
    result = run_fedcg("agent", *words, "--passphrase-file", root / "passphrase", "--json")
    return str(json.loads(result.stdout)["error"]["next"])


def made(box: Path) -> Path:
    file = box.parent.parent / "backup"
    code, output = run("backup", "--config", box, "--out", file, root=file.parent)
    assert code == 0, output
    assert "trained up to round 2" in output
    return file


def test_a_restored_box_has_identity_configuration_and_all_private_state(box: Path, tmp_path: Path) -> None:
    file = made(box)
    assert file.stat().st_mode & 0o777 == 0o600
    new = tmp_path / "new" / "agent.toml"
    code, output = run("restore", file, "--config", new, root=tmp_path)
    assert code == 0, output
    assert f"Restored device {DEVICE} of {FEDERATION}, trained up to round 2" in output
    for told in ("must not run again", "`conflict`", "spent privacy"):
        assert told in output
    before, after = (open_store(load_config(path, {})) for path in (box, new))
    assert contents(after) == contents(before) | {"checkpoint": {}}
    for name in ("agent.toml", "signing.key", "coordinator.pub"):
        assert new.with_name(name).read_bytes() == box.with_name(name).read_bytes()
    assert after.open_to_others() == ()
    left_out = {"lock", "trainer.lock", "checkpoint.bin"}
    assert files_of(after.root) == {name: data for name, data in files_of(before.root).items() if name not in left_out}


def test_nothing_is_overwritten(box: Path, tmp_path: Path) -> None:
    file, before = made(box), files_of(box.parent)
    code, output = run("restore", file, "--config", box, root=tmp_path)
    assert code == EXISTS
    assert f"{box.parent / 'store'} is there already" in output
    code, output = run("backup", "--config", box, "--out", file, root=tmp_path)
    assert code == EXISTS
    assert "exists already" in output
    other = write_device(tmp_path / "other", "site-9")
    code, output = run("restore", file, "--config", other, root=tmp_path)
    assert code == 1
    assert "is of device 'site-9'" in output
    same = write_device(tmp_path / "same")  # another signing key
    kept = files_of(same.parent)
    code, output = run("restore", file, "--config", same, root=tmp_path)
    assert code == EXISTS
    assert "signing.key is there already and differs" in output
    assert files_of(same.parent) == kept
    assert files_of(box.parent) == before


def test_an_agent_toml_that_is_there_names_the_places(box: Path, tmp_path: Path) -> None:
    file = made(box)
    new = tmp_path / "new" / "agent.toml"
    new.parent.mkdir()
    new.write_text(f'store = "elsewhere/state"\n{box.read_text()}')
    facts = data_of(
        run_fedcg(
            "agent", "restore", file, "--config", new, "--passphrase-file", tmp_path / "passphrase", "--json"
        ).stdout
    )
    assert (facts["device"], facts["round"]) == (DEVICE, 2)
    assert facts["store"] == str(new.parent / "elsewhere" / "state")
    assert (new.parent / "elsewhere" / "state" / "CURRENT").exists()
    assert sorted(path.name for path in (new.parent / "elsewhere").iterdir()) == ["state"]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.999])
def test_a_truncated_or_altered_file_and_a_wrong_passphrase_write_nothing(box: Path, tmp_path: Path, at: float) -> None:
    file = made(box)
    whole, new = file.read_bytes(), tmp_path / "new" / "agent.toml"
    place = int(at * len(whole))
    for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole + b"x"):
        file.write_bytes(content)
        code, output = run("restore", file, "--config", new, root=tmp_path)
        assert (code, new.parent.exists()) == (1, False), output
        assert str(file) in output
    file.write_bytes(whole)
    (tmp_path / "passphrase").write_text("another passphrase\n")
    code, output = run("restore", file, "--config", new, root=tmp_path)
    assert (code, new.parent.exists()) == (1, False)
    assert "another passphrase was used" in output
    assert "give the passphrase with which it was written" in failure_of(
        "restore", file, "--config", new, root=tmp_path
    )


@pytest.mark.parametrize("name", ["signing.key", "store/secrets/device.key", "store/counter.json"])
def test_a_damaged_box_is_not_backed_up_and_its_status_names_the_file(box: Path, tmp_path: Path, name: str) -> None:
    path = box.parent / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    code, output = run("backup", "--config", box, "--out", tmp_path / "backup", root=tmp_path)
    assert code != 0
    assert str(path) in output
    assert not (tmp_path / "backup").exists()
    shown = data_of(run_fedcg("agent", "status", "--config", box, "--json").stdout)
    assert str(path) in shown["problem"]


def test_a_torn_line_of_a_record_hinders_no_backup(box: Path, tmp_path: Path) -> None:
    for name in ("sent.jsonl", "ledger.jsonl"):
        with (box.parent / "store" / name).open("a") as file:
            file.write('{"kind": "round", "t": 1')  # the power was cut
    made(box)
    shown = data_of(run_fedcg("agent", "status", "--config", box, "--json").stdout)
    assert shown["problem"] is None


def test_a_backup_without_a_key_of_the_box_is_refused(box: Path, tmp_path: Path) -> None:
    box.with_name("signing.key").unlink()
    code, output = run("backup", "--config", box, "--out", tmp_path / "backup", root=tmp_path)
    assert (code, "signing.key" in output) == (BAD_INPUT, True)
    assert not (tmp_path / "backup").exists()


def test_a_backup_is_refused_while_the_agent_runs(box: Path, tmp_path: Path) -> None:
    with open_store(load_config(box, {})).locked():
        code, output = run("backup", "--config", box, "--out", tmp_path / "backup", root=tmp_path)
    assert code == ALREADY_RUNNING
    assert "stop it first" in output
    assert not (tmp_path / "backup").exists()


def test_a_restore_that_was_cut_is_repeated(box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, new = made(box), tmp_path / "new" / "agent.toml"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "replace_durably", full)  # the store is in its staging folder, the keys are not there yet
        assert run("restore", file, "--config", new, root=tmp_path)[0] == 1
    assert files_of(new.parent) == {}
    assert run("restore", file, "--config", new, root=tmp_path)[0] == 0


@pytest.mark.parametrize("words", [("backup", "--out", "OUT"), ("restore", "FILE")])
def test_without_a_terminal_the_passphrase_file_is_asked_for(tmp_path: Path, words: tuple[str, ...]) -> None:
    config = write_device(tmp_path / "box")
    PrivateStore.open(tmp_path / "box" / "store", FEDERATION, DEVICE)
    (tmp_path / "FILE").write_bytes(b"")
    command = [sys.executable, "-m", "fedcg", "agent", *words, "--config", str(config)]
    done = subprocess.run(
        command,
        input="a passphrase\n" * 2,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert "there is no terminal to ask for the passphrase: give --passphrase-file FILE" in said
    assert "GetPassWarning" not in said
    assert not (tmp_path / "OUT").exists()
