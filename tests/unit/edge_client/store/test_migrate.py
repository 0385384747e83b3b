"""`fedcg agent store migrate`: a private store is checked; a store of another format is left as it was."""

import os
from pathlib import Path

import pytest

from edge_client.store.checked_files import read_json, write_json
from edge_client.store.private_store import STORE_FORMAT, PrivateStore
from fedcg.errors import ALREADY_RUNNING, BAD_INPUT
from fedcg.files import SECRET_BYTES
from tests.support.box_install import AGENT_TOML, content, fill_store
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.filled_store import fill
from tests.support.edge.world import DEVICE, FEDERATION, write_device


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a device's configuration and a store."""
    (tmp_path / "agent.toml").write_text(AGENT_TOML)
    fill_store(tmp_path / "store", STORE_FORMAT)
    return tmp_path


def test_a_sound_store_is_checked_and_nothing_changes(place: Path) -> None:
    before = content(place)
    facts = data_of(run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml", "--json").stdout)
    assert (facts["format"], facts["round"], facts["problems"]) == (STORE_FORMAT, 2, [])
    again = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert f"has format {STORE_FORMAT}, trained up to round 2" in again.stdout
    assert content(place) == before


def test_a_secret_without_its_check_is_refused_by_name(place: Path) -> None:
    (place / "store" / "secrets" / "device.key").write_bytes(b"d" * SECRET_BYTES)
    refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert refused.exit_code == BAD_INPUT
    assert "secrets/device.key is damaged" in refused.stderr


def test_a_damaged_newest_state_is_named_and_the_one_before_it_counts(place: Path) -> None:
    (place / "store" / "generations" / "2" / "state.safetensors").write_bytes(b"torn")
    done = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert done.exit_code == 0
    assert "generation 2 is damaged" in done.stdout


@pytest.mark.parametrize("harm", ["damaged", "open", "running", "newer", "older"])
def test_a_store_that_an_agent_could_not_use_is_refused_with_the_next_step_and_left_as_it_was(
    place: Path, harm: str
) -> None:
    store = place / "store"
    if harm == "damaged":
        for state in store.glob("generations/*/state.safetensors"):
            state.write_bytes(b"torn")
    elif harm == "open":
        (store / "secrets").chmod(0o755)
    elif harm in ("newer", "older"):
        version = STORE_FORMAT + (1 if harm == "newer" else -1)
        write_json(store / "format.json", {**read_json(store / "format.json"), "format": version})
    before = content(store)
    if harm == "running":
        with PrivateStore(store).locked():
            refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    else:
        refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    named = f"reads format {STORE_FORMAT} alone. Use the program that wrote it"
    remedy = {"damaged": "Restore", "open": "chmod go=", "running": "stop it first"}.get(harm, named)
    assert refused.exit_code == (ALREADY_RUNNING if harm == "running" else BAD_INPUT)
    assert remedy in " ".join(refused.stderr.split())
    assert content(store) == before


def test_another_user_changes_no_store(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(place)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert refused.exit_code == BAD_INPUT
    assert "run this as that user" in " ".join(refused.stderr.split())
    assert content(place) == before


@pytest.mark.parametrize("name", ["generations/2/state.safetensors", "consent.json", "."])
def test_the_agent_refuses_a_store_that_is_open_to_others_and_names_file_and_command(tmp_path: Path, name: str) -> None:
    config = write_device(tmp_path)
    fill(PrivateStore.open(tmp_path / "store", FEDERATION, DEVICE))
    opened = tmp_path / "store" / name
    if not opened.exists():
        opened.touch()
    opened.chmod(0o755 if opened.is_dir() else 0o644)
    refused = run_fedcg("agent", "run", "--config", config)
    assert refused.exit_code == BAD_INPUT
    assert f"chmod go= {opened}" in " ".join(refused.stderr.split())
