"""A disk that is full (RLIMIT_FSIZE: the system refuses to let a file grow) under a real agent, coordinator and training process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.wire.messages.schemas import COORDINATOR
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import acl_for
from tests.support.waiting import wait_until
from tests.support.wire.transfer_parties import FEDERATION, Parties, Plan

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(120)]
SIZE = 400_000
TOO_SMALL = 300_000


@pytest.fixture
def parties(tmp_path: Path, mosquitto: StartMosquitto) -> Iterator[Parties]:
    broker = mosquitto(acl_for(FEDERATION))
    made = Parties(tmp_path, Plan(str(broker.pki.directory), broker.port, {"a": broker.port}, SIZE))
    made.prepare()
    yield made
    made.stop()


def finish(parties: Parties) -> None:
    """The round completes with the one update, once."""
    parties.wait_finished()
    (stored,) = parties.events(COORDINATOR, "update_stored")
    (receipt,) = parties.events("a", "receipt")
    assert (receipt["outcome"], receipt["artifact"]) == ("accepted", stored["artifact"])
    assert len(parties.events(COORDINATOR, "attempt_opened")) == 1


def test_an_agent_whose_disk_is_full_stays_up_reports_it_and_goes_on_when_there_is_room(parties: Parties) -> None:
    parties.start_all()
    parties.limit_files("a", TOO_SMALL)
    error = parties.event("a", "agent_error", "the disk is full")
    assert "File too large" in error["detail"]
    assert "Free space on" in parties.tail("a")
    assert [event["what"] for event in parties.events("a", "artifact_stored")] in ([], ["spec"])
    assert parties.running["a"].poll() is None
    parties.limit_files("a")
    finish(parties)
    assert len(parties.events("a", "agent_started")) == 1


def test_a_coordinator_whose_disk_is_full_ends_and_goes_on_with_the_same_attempt_when_it_is_started_again(
    parties: Parties,
) -> None:
    parties.start(COORDINATOR)
    parties.event(COORDINATOR, "started")
    parties.limit_files(COORDINATOR, TOO_SMALL)
    parties.start("a")
    wait_until(lambda: parties.running[COORDINATOR].poll() is not None, "the coordinator ends", 60.0)
    assert parties.running[COORDINATOR].returncode != 0
    assert "File too large" in parties.tail(COORDINATOR)
    assert parties.events(COORDINATOR, "update_stored") == []
    assert parties.events("a", "receipt") == []
    parties.start(COORDINATOR)
    finish(parties)
