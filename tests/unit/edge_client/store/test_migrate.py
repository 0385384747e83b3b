"""`fedcg agent store migrate`: a private store of any format is checked and brought to the present one, or is left as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.store.encryption import STORE_FORMAT
from edge_client.store.private_store import PrivateStore
from fedcg.errors import ALREADY_RUNNING, FAILED
from tests.support.box_install import AGENT_TOML, content, fill_store
from tests.support.commands import data_of, run_fedcg


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a device's configuration and a store of format 1."""
    (tmp_path / "agent.toml").write_text(AGENT_TOML)
    fill_store(tmp_path / "store", 1)
    return tmp_path


def format_of(place: Path) -> int:
    return int(json.loads((place / "store" / "format.json").read_text())["format"])


def test_a_store_of_the_first_format_gets_the_present_one_and_a_second_time_changes_nothing(place: Path) -> None:
    facts = data_of(run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml", "--json").stdout)
    assert (facts["format"], facts["round"], facts["problems"]) == (STORE_FORMAT, 2, [])
    assert format_of(place) == STORE_FORMAT
    once = content(place)
    again = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert f"has format {STORE_FORMAT}, trained up to round 2" in again.stdout
    assert content(place) == once


def test_a_damaged_newest_state_is_named_and_the_one_before_it_counts(place: Path) -> None:
    (place / "store" / "generations" / "2" / "state.safetensors").write_bytes(b"torn")
    done = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    assert done.exit_code == 0
    assert "generation 2 is damaged" in done.stdout
    assert format_of(place) == STORE_FORMAT


@pytest.mark.parametrize("harm", ["damaged", "open", "running", "newer"])
def test_a_store_that_an_agent_could_not_use_is_refused_with_the_next_step_and_left_as_it_was(
    place: Path, harm: str
) -> None:
    store = place / "store"
    if harm == "damaged":
        for state in store.glob("generations/*/state.safetensors"):
            state.write_bytes(b"torn")
    elif harm == "open":
        (store / "secrets").chmod(0o755)
    elif harm == "newer":
        (store / "format.json").write_text('{"format": 99, "federation": "shapes", "device": "site-1"}')
    before = content(store)
    if harm == "running":
        with PrivateStore(store).locked():
            refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    else:
        refused = run_fedcg("agent", "store", "migrate", "--config", place / "agent.toml")
    remedy = {"damaged": "Restore", "open": "chmod go=", "running": "stop it first", "newer": "reads up to"}[harm]
    assert refused.exit_code == (ALREADY_RUNNING if harm == "running" else FAILED)
    assert remedy in " ".join(refused.stderr.split())
    assert content(store) == before
