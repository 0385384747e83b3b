"""Backup and restore of a device in one encrypted file, and `fedcg agent store migrate`, which checks a private store."""

import os
from pathlib import Path

import pytest
from typer.testing import Result

from edge_client.config import load_config
from edge_client.store import backup
from edge_client.store.private_store import STORE_FORMAT, PrivateStore, open_store
from fedcg import sealing
from fedcg.errors import ALREADY_RUNNING, BAD_INPUT, EXISTS
from tests.support.box_install import AGENT_TOML, content, fill_store
from tests.support.commands import data_of, fails, run_fedcg
from tests.support.edge.filled_store import contents, files_of, fill
from tests.support.edge.world import DEVICE, FEDERATION, write_device

PASSPHRASE = "correct horse battery"


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device's configuration beside a filled store; its backups are sealed quickly."""
    monkeypatch.setattr(sealing, "SCRYPT_N", 1 << 10)
    config = write_device(tmp_path / "box")
    (tmp_path / "passphrase").write_text(PASSPHRASE + "\n")
    fill(PrivateStore.open(tmp_path / "box" / "store", FEDERATION, DEVICE))
    return config


def run(*words: object, root: Path, ends: int = 0) -> str:
    """What `fedcg agent` prints, which must end with this code."""
    result = run_fedcg("agent", *words, "--passphrase-file", root / "passphrase")
    assert result.exit_code == ends, result.output
    return " ".join((result.output + result.stderr).split())


def made(box: Path) -> Path:
    file = box.parent.parent / "backup"
    assert "trained up to round 2" in run("backup", "--config", box, "--out", file, root=file.parent)
    return file


def test_a_restored_box_has_identity_configuration_and_all_private_state(box: Path, tmp_path: Path) -> None:
    file = made(box)
    assert file.stat().st_mode & 0o777 == 0o600
    new = tmp_path / "new" / "agent.toml"
    output = run("restore", file, "--config", new, root=tmp_path)
    assert f"Restored device {DEVICE} of {FEDERATION}, trained up to round 2" in output
    for told in ("must not run again", "`conflict`", "spent privacy", f"fedcg cohort resume-sums ROUND --config {new}"):
        assert told in output
    before, after = (open_store(load_config(path, {})) for path in (box, new))
    assert contents(after) == contents(before) | {"checkpoint": {}}
    for name in ("agent.toml", "signing.key", "coordinator.pub"):
        assert new.with_name(name).read_bytes() == box.with_name(name).read_bytes()
    assert after.open_to_others() == ()
    assert (before.sum_gate.first_round, after.sum_gate.first_round) == (1, None), "it does not know its last sums"
    assert after.sum_record("parts") == before.sum_record("parts")
    left_out = {"lock", "trainer.lock", "checkpoint.bin", "sum_gate.json", "counter.json"}
    kept = [
        {name: data for name, data in files_of(store.root).items() if name not in left_out} for store in (before, after)
    ]
    assert kept[0] == kept[1]


def test_nothing_is_overwritten(box: Path, tmp_path: Path) -> None:
    file, before = made(box), files_of(box.parent)
    output = run("restore", file, "--config", box, root=tmp_path, ends=EXISTS)
    assert f"{box.parent / 'store'} exists" in output
    assert "exists already" in run("backup", "--config", box, "--out", file, root=tmp_path, ends=EXISTS)
    other = write_device(tmp_path / "other", "site-9")
    assert "is for device 'site-9'" in run("restore", file, "--config", other, root=tmp_path, ends=1)
    same = write_device(tmp_path / "same")  # another signing key
    kept = files_of(same.parent)
    output = run("restore", file, "--config", same, root=tmp_path, ends=EXISTS)
    assert "signing.key exists and differs" in output
    assert (files_of(same.parent), files_of(box.parent)) == (kept, before)


def test_an_agent_toml_that_is_there_names_the_places(box: Path, tmp_path: Path) -> None:
    file = made(box)
    new = tmp_path / "new" / "agent.toml"
    new.parent.mkdir()
    new.write_text(f'store = "elsewhere/state"\n{box.read_text()}')
    words = ("agent", "restore", file, "--config", new, "--passphrase-file", tmp_path / "passphrase", "--json")
    facts = data_of(run_fedcg(*words).stdout)
    assert (facts["device"], facts["round"]) == (DEVICE, 2)
    assert facts["store"] == str(new.parent / "elsewhere" / "state")
    assert (new.parent / "elsewhere" / "state" / "CURRENT").exists()
    assert sorted(path.name for path in (new.parent / "elsewhere").iterdir()) == ["state"]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.999])
def test_a_truncated_or_altered_file_and_a_wrong_passphrase_write_nothing(box: Path, tmp_path: Path, at: float) -> None:
    file = made(box)
    whole, new = file.read_bytes(), tmp_path / "new" / "agent.toml"
    place = int(at * len(whole))
    for changed in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole + b"x"):
        file.write_bytes(changed)
        assert str(file) in run("restore", file, "--config", new, root=tmp_path, ends=1)
        assert not new.parent.exists()
    file.write_bytes(whole)
    (tmp_path / "passphrase").write_text("another passphrase\n")
    output = run("restore", file, "--config", new, "--json", root=tmp_path, ends=1)
    assert not new.parent.exists()
    assert "another passphrase was used" in output
    assert "give the passphrase that it was written with" in output


@pytest.mark.parametrize("name", ["signing.key", "store/secrets/device.key", "store/counter.json"])
def test_a_damaged_box_is_not_backed_up_and_its_status_names_the_file(box: Path, tmp_path: Path, name: str) -> None:
    path = box.parent / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    assert str(path) in run("backup", "--config", box, "--out", tmp_path / "backup", root=tmp_path, ends=BAD_INPUT)
    assert not (tmp_path / "backup").exists()
    assert str(path) in data_of(run_fedcg("agent", "status", "--config", box, "--json").stdout)["problem"]


def test_a_torn_line_of_a_record_hinders_no_backup(box: Path, tmp_path: Path) -> None:
    for name in ("sent.jsonl", "ledger.jsonl"):
        with (box.parent / "store" / name).open("a") as file:
            file.write('{"kind": "round", "t": 1')  # the power was cut
    made(box)
    assert data_of(run_fedcg("agent", "status", "--config", box, "--json").stdout)["problem"] is None


def test_a_backup_without_a_key_of_the_box_or_while_the_agent_runs_is_refused(box: Path, tmp_path: Path) -> None:
    words = ("backup", "--config", box, "--out", tmp_path / "backup")
    with open_store(load_config(box, {})).locked():
        assert "stop it first" in run(*words, root=tmp_path, ends=ALREADY_RUNNING)
    box.with_name("signing.key").unlink()
    assert "signing.key" in run(*words, root=tmp_path, ends=BAD_INPUT)
    assert not (tmp_path / "backup").exists()


def test_a_restore_that_was_cut_is_repeated(box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, new = made(box), tmp_path / "new" / "agent.toml"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "replace_durably", full)  # the store is in its staging folder, the keys are not there yet
        run("restore", file, "--config", new, root=tmp_path, ends=1)
    assert files_of(new.parent) == {}
    run("restore", file, "--config", new, root=tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a device's configuration and a store."""
    (tmp_path / "agent.toml").write_text(AGENT_TOML)
    fill_store(tmp_path / "store", STORE_FORMAT)
    return tmp_path


def migrate(place: Path) -> Result:
    return run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")


def test_a_sound_store_is_checked_and_nothing_changes(place: Path) -> None:
    before = content(place)
    facts = data_of(run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml", "--json").stdout)
    assert (facts["format"], facts["round"], facts["problems"]) == (STORE_FORMAT, 2, [])
    assert f"has format {STORE_FORMAT}, trained up to round 2" in migrate(place).stdout
    assert content(place) == before


def test_a_damaged_newest_state_is_named_and_the_one_before_it_counts(place: Path) -> None:
    (place / "store" / "generations" / "2" / "state.safetensors").write_bytes(b"torn")
    done = migrate(place)
    assert done.exit_code == 0
    assert "generation 2 is damaged" in done.stdout


@pytest.mark.parametrize(("kind", "remedy"), [("damaged", "Restore"), ("open", "chmod go=")])
def test_a_store_that_an_agent_could_not_use_is_refused_with_the_next_step_and_left_as_it_was(
    place: Path, kind: str, remedy: str
) -> None:
    store = place / "store"
    if kind == "damaged":
        for state in store.glob("generations/*/state.safetensors"):
            state.write_bytes(b"torn")
    else:
        (store / "secrets").chmod(0o755)
    before = content(store)
    refused = migrate(place)
    assert (refused.exit_code, remedy in " ".join(refused.stderr.split())) == (BAD_INPUT, True), refused.stderr
    assert content(store) == before


def test_a_store_of_a_running_agent_is_not_migrated(place: Path) -> None:
    with PrivateStore(place / "store").locked():
        refused = migrate(place)
    assert (refused.exit_code, "stop it first" in refused.stderr) == (ALREADY_RUNNING, True)


def test_another_user_changes_no_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(place)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert "run this as that user" in fails(BAD_INPUT, "agent", "store", "migrate", "--config", place / "agent.toml")
    assert content(place) == before


@pytest.mark.parametrize("name", ["generations/2/state.safetensors", "consent.json", "."])
def test_the_agent_refuses_a_store_that_is_open_to_others_and_names_file_and_command(tmp_path: Path, name: str) -> None:
    config = write_device(tmp_path)
    fill(PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE))
    opened = tmp_path / "store" / name
    if not opened.exists():
        opened.touch()
    opened.chmod(0o755 if opened.is_dir() else 0o644)
    assert f"chmod go= {opened}" in fails(BAD_INPUT, "agent", "run", "--config", config)
