"""A device joins a second federation: what is written, with which identity, and who renews the certificate."""

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from coordinator.paths import Home
from edge_client.config import AgentConfig, load_config
from edge_client.identity.credentials import Renewer, load_keys
from edge_client.identity.enrol import enrol
from edge_client.store.private_store import PrivateStore
from fedcg.config_file import set_values
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.event_log import EventLog
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey
from fedcg.wire.parts import Part
from tests.support.commands import run_fedcg
from tests.support.coordinator.enrolments import FEDERATION, Desk, open_home, running_desk
from tests.support.waiting import wait_until


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
def first(home: Home, tmp_path: Path) -> Path:
    """The agent.toml of an enrolled device that may upload its classifier only."""
    with running_desk(home) as desk:
        enrol(desk.token("line-4"), tmp_path / "box")
    (tmp_path / "images").mkdir()
    path = tmp_path / "box" / "agent.toml"
    settings: dict[tuple[str, str], str | bool | float | list[str]] = {("policy", "allow_upload"): ["classifier"]}
    settings |= {("eligibility", "stop_file"): "stop", ("", "metrics_folder"): "prom"}
    settings |= {("audit", "before_publish"): "quick", ("audit", "auxiliary"): "aux", ("privacy", "prune"): 0.5}
    path.write_text(set_values(path.read_text(), settings))
    return path


def join(first: Path, *words: object, federation: str = "second") -> tuple[int, str]:
    images = first.parent.parent / "images"
    named = ("--config", first, "--federation", federation, "--data", images)
    done = run_fedcg("agent", "join", *named, "--out", first.parent.parent / "second", *words)
    return done.exit_code, done.output


def second_of(first: Path) -> AgentConfig:
    return load_config(first.parent.parent / "second" / "agent.toml", {})


def test_the_second_federation_has_a_store_of_its_own_and_the_identity_and_policy_of_the_first(first: Path) -> None:
    assert join(first)[0] == 0
    one, two = load_config(first, {}), second_of(first)
    assert (two.federation, two.device) == ("second", one.device)
    assert (two.tls, two.keys, two.policy, two.broker) == (one.tls, one.keys, one.policy, one.broker)
    assert two.policy.allow_upload == frozenset({Part.CLASSIFIER})
    assert (two.audit, two.privacy) == (one.audit, one.privacy)
    assert (two.audit.is_on, two.privacy.prune) == (True, 0.5)
    assert (two.eligibility, two.metrics_folder) == (one.eligibility, one.metrics_folder)
    assert two.eligibility.stop_file is not None
    assert two.training_lock == one.training_lock
    assert two.store != one.store
    assert two.data.root == first.parent.parent / "images"
    assert load_keys(two).signing.public == load_keys(one).signing.public
    assert not list((first.parent.parent / "second").rglob("*.key"))
    PrivateStore.open(two.store, "second", one.device)


def test_a_key_of_the_coordinator_that_was_replaced_is_not_trusted_again_in_the_second_federation(first: Path) -> None:
    one = load_config(first, {})
    enrolled, followed = load_keys(one).coordinator, PinnedKey(SigningKey.generate().public, 1)
    PrivateStore.open(one.store, one.federation, one.device).save_pinned_key(enrolled, followed)
    assert join(first)[0] == 0
    assert PrivateStore(second_of(first).store).pinned_key(enrolled) == followed


@pytest.mark.parametrize(
    ("change", "ends", "why"),
    [
        ({"federation": "Second!"}, BAD_INPUT, "small letters, digits and dashes"),
        ({"federation": FEDERATION}, BAD_INPUT, "is in it already"),
        ({"out": "box"}, EXISTS, "is not empty"),
        ({"data": "nowhere"}, NOT_FOUND, "there is no such file or folder"),
    ],
)
def test_a_second_federation_that_can_not_be_is_refused_and_nothing_is_written(
    first: Path, change: dict[str, str], ends: int, why: str
) -> None:
    root = first.parent.parent
    words = ["--config", str(first), "--federation", change.get("federation", "second")]
    words += ["--out", str(root / change.get("out", "second")), "--data", str(root / change.get("data", "images"))]
    command = [sys.executable, "-m", "fedcg", "agent", "join", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ends
    assert why in done.stderr
    assert not (root / "second").exists()


def days_ahead(days: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(days=days)


def renewer(config: AgentConfig, clock: Callable[[], datetime], renewed: threading.Event) -> Renewer:
    config.store.mkdir(parents=True, exist_ok=True)
    events = EventLog(config.store / "events.jsonl", lambda: 0.0)
    return Renewer(config, load_keys(config).signing, events, renewed.set, clock=clock)


def test_of_two_agents_with_one_identity_one_renews_and_both_connect_anew(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.identity.credentials.LOOK_AGAIN", timedelta(seconds=0.2))
    with running_desk(home) as desk:
        enrol(desk.token("line-4"), tmp_path / "box")
        (tmp_path / "images").mkdir()
        path = tmp_path / "box" / "agent.toml"
        assert join(path)[0] == 0
        due = threading.Event()
        pasts = {True: 25.0, False: 1.0}  # a due certificate is renewed once; the new one is as old as the clock says

        def clock() -> datetime:
            return days_ahead(pasts[due.is_set() and _certificates(desk) == 1])

        told = threading.Event(), threading.Event()
        configs = load_config(path, {}), second_of(path)
        with renewer(configs[0], clock, told[0]).running(), renewer(configs[1], clock, told[1]).running():
            due.set()
            for one in told:
                wait_until(one.is_set, "it connects anew")
        assert _certificates(desk) == 2


def _certificates(desk: Desk) -> int:
    return len(desk.store.register.certificates("line-4"))
