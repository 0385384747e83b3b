"""With PostgreSQL and S3 the coordinator's process and directory hold no state of a round: one started elsewhere goes on with it."""

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from coordinator.storage.database import PASSWORD_VARIABLE
from tests.support.object_store import Moto, running_moto
from tests.support.postgres import PASSWORD, Cluster
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

PARAMS = {"epochs": 6, "server_iterations": 600, "server_batch": 16, "ramp_rounds": 2}
CONFIGURATION = ("coordinator.toml", "signing.key", "coordinator.secret", "pki")


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    with running_moto(monkeypatch) as server:
        yield server


@pytest.fixture
def stack(tmp_path: Path, postgres: Cluster, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    database = postgres.make_database().set(password=None).render_as_string()
    made = Stack(root=tmp_path, params=PARAMS, rounds=2, storage={"database": database, "artifacts": moto.url})
    made.prepare()
    try:
        yield made
    finally:
        made.stop()


def ready(stack: Stack) -> tuple[int, str]:
    url = f"http://127.0.0.1:{stack.api_port}/readyz"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.load(answer)["status"]
    except HTTPError as error:
        return error.code, json.load(error)["status"]
    except URLError as error:
        return 0, str(error)


def is_stored(event: dict[str, object]) -> bool:
    return event["event"] == "update_stored"


@pytest.mark.slow  # in short: test_artifacts, test_database
def test_a_coordinator_killed_and_started_from_configuration_and_keys_alone_goes_on_with_the_round(
    stack: Stack,
) -> None:
    stack.start_all()
    stack.wait_event("coordinator", is_stored, "a first update is stored")
    stack.kill("coordinator")
    killed_at = time.time()
    before = stack.events("coordinator")
    first = stack.home
    stack.home_name = "elsewhere"
    stack.home.mkdir()
    for name in CONFIGURATION:
        copy = shutil.copytree if (first / name).is_dir() else shutil.copy2
        copy(first / name, stack.home / name)
    stack.start_coordinator()
    stored = stack.wait_event("coordinator", is_stored, "the next update is stored")
    sys.stdout.write(
        f"seconds from SIGKILL to the next accepted update: {stored['t'] - killed_at:.1f}\n"
    )  # with pytest -s
    stack.wait_finished()
    after = stack.events("coordinator")
    resumed = next(event for event in after if event["event"] == "attempt_resumed")
    earlier = sorted(str(event["client"]) for event in before if is_stored(event))
    assert (resumed["round"], resumed["attempt"]) == (1, 1)
    assert sorted(resumed["stored"]) == earlier  # nothing that was accepted is lost
    later = [event["client"] for event in after if is_stored(event) and event["round"] == 1]
    assert sorted([*earlier, *later]) == sorted(stack.devices)
    assert [event for event in before + after if event["event"] == "attempt_failed"] == []


@pytest.mark.slow  # in short: test_backup
def test_a_coordinator_restored_from_a_backup_goes_on_with_the_round(tmp_path: Path) -> None:
    stack = Stack(root=tmp_path, params=PARAMS, rounds=2)
    stack.prepare()
    (tmp_path / "passphrase").write_text("correct horse battery")
    words = ("--passphrase-file", str(tmp_path / "passphrase"))
    try:
        stack.start_all()
        stack.wait_event("coordinator", is_stored, "a first update is stored")
        stack.command("coordinator", "backup", "--out", str(tmp_path / "backup"), "--dir", str(stack.home), *words)
        stack.kill("coordinator")
        stack.home_name = "restored"
        stack.command("coordinator", "restore", str(tmp_path / "backup"), "--dir", str(stack.home), *words)
        stack.start_coordinator()
        resumed = stack.wait_event("coordinator", lambda event: event["event"] == "resumed", "it goes on")
        stack.wait_finished()
        assert resumed["round"] == 1
        stored = next(event for event in stack.events("coordinator") if event["event"] == "attempt_resumed")["stored"]
        assert stored
        assert [event for event in stack.events("coordinator") if event["event"] == "attempt_failed"] == []
    finally:
        stack.stop()


@pytest.mark.slow  # in short: test_a_round_waits_for_its_store_of_artifacts_loses_nothing_and_goes_on
def test_a_federation_finishes_through_an_outage_of_its_store_that_readiness_names(stack: Stack, moto: Moto) -> None:
    stack.start_all()
    stack.wait_event("coordinator", lambda event: event["event"] == "attempt_opened", "a round is open")
    moto.kill()
    wait_for(lambda: ready(stack)[0] == 503 and moto.url in ready(stack)[1], "readiness names the store", 60)
    stored = len([event for event in stack.events("coordinator") if is_stored(event)])
    moto.start()
    wait_for(lambda: ready(stack) == (200, "ok"), "the coordinator is ready", 60)
    stack.wait_finished()
    assert stored == 0
    assert [event for event in stack.events("coordinator") if event["event"] == "attempt_failed"] == []
    assert stack.final_aggregate() in moto.objects()
