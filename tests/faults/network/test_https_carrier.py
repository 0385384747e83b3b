"""The HTTPS carrier with real processes: cut, stalled and switched in mid-transfer, the round completes, nothing counts twice, and
what had arrived is not carried again. Killed processes are in `test_transfers_killed`."""

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator.service.service import Service
from fedcg.wire.messages.schemas import COORDINATOR, Carrier
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import acl_for
from tests.support.broker.throttle import Weather
from tests.support.waiting import free_port
from tests.support.wire.transfer_parties import (
    FEDERATION,
    SOME,
    MakeWorld,
    Parties,
    Plan,
    chunks_of,
    run_agent,
    run_coordinator,
    worlds,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(200)]


@pytest.fixture
def make_world(tmp_path: Path, mosquitto: StartMosquitto) -> Iterator[MakeWorld]:
    with worlds(tmp_path, mosquitto, Carrier.HTTPS) as make:
        yield make


def run_to_the_end(root: Path, mosquitto: StartMosquitto, **plan: Any) -> Parties:
    """A federation of a and b without any weather, on threads of this process."""
    broker = mosquitto(acl_for(FEDERATION, ("a", "b", "c")))
    root.mkdir()
    ports = {"a": broker.port, "b": broker.port}
    parties = Parties(root, Plan(str(broker.pki.directory), broker.port, ports, size=300_000, **plan))
    parties.prepare()
    services: queue.SimpleQueue[Service] = queue.SimpleQueue()
    with ThreadPoolExecutor(3) as threads:
        coordinator = threads.submit(lambda: asyncio.run(run_coordinator(root, services.put)))
        service = services.get(timeout=30)
        agents = [threads.submit(run_agent, root, device) for device in ports]
        try:
            assert [agent.result(timeout=60) for agent in agents] == [0, 0]
        finally:
            service.stop()
            coordinator.result(timeout=30)
            broker.stop()
    return parties


def final_aggregate(parties: Parties) -> str:
    return str(parties.events(COORDINATOR, "finished")[0]["aggregate"])


def test_the_aggregate_is_the_same_whatever_carries_the_artifacts(tmp_path: Path, mosquitto: StartMosquitto) -> None:
    port = free_port()
    mixed = run_to_the_end(tmp_path / "mixed", mosquitto, carrier_port=port, carrier_ports={"a": port})
    alike = run_to_the_end(tmp_path / "alike", mosquitto)
    assert final_aggregate(mixed) == final_aggregate(alike)
    assert final_aggregate(alike) != alike.events(COORDINATOR, "attempt_opened")[0]["aggregate"]
    assert {event["way"] for event in mixed.events("a", "carrier") if event["works"]} == {"up", "down"}
    assert mixed.events("b", "carrier") == []
    for parties in (mixed, alike):
        stored = parties.events(COORDINATOR, "update_stored")
        assert sorted(event["client"] for event in stored) == ["a", "b"]


@pytest.mark.slow
def test_a_link_that_is_reset_again_and_again_loses_nothing_that_had_arrived(make_world: MakeWorld) -> None:
    world = make_world(Weather(bytes_per_s=400_000, reset_after=(200_000, 600_000, 1_200_000, 1_700_000)))
    came = world.finish()
    assert world.link.resets == 4
    assert (came["resumed"], came["received"]) == (0, chunks_of(came))
    down = world.download()
    assert (down["resumed"], down["received"]) == (0, chunks_of(down))
    troubles = [event for event in world.parties.events("a", "carrier") if not event["works"]]
    assert troubles, "a reset is logged"


@pytest.mark.slow
def test_a_link_that_goes_dead_without_a_word_is_given_up_and_tried_again(make_world: MakeWorld) -> None:
    world = make_world()
    parties = world.parties
    parties.await_chunks(lambda: parties.uploaded("a"), SOME, "the upload is under way")
    world.link.hold()

    def failed() -> bool:
        return any(not event["works"] and event["way"] == "up" for event in parties.events("a", "carrier"))

    parties.await_chunks(failed, 1, "the agent gives the dead connection up")
    world.link.release()
    came = world.finish()
    assert came["received"] == chunks_of(came)
    assert parties.events("a", "link") == [event for event in parties.events("a", "link") if event["up"]]


@pytest.mark.slow
@pytest.mark.parametrize("before", list(Carrier))
def test_a_device_that_changes_its_carrier_in_mid_upload_goes_on_from_what_is_there(
    tmp_path: Path, mosquitto: StartMosquitto, before: Carrier
) -> None:
    with worlds(tmp_path, mosquitto, before) as make:
        world = make()
        parties = world.parties
        parties.await_chunks(lambda: parties.uploaded("a"), SOME, "the upload is under way")
        parties.kill("a")
        there = parties.uploaded("a")
        parties.change_carrier("a", parties.plan.carrier_port if before is Carrier.MQTT else None)
        parties.start("a")
        came = world.finish()
        # the same coordinator opened its file anew: what the other carrier had brought counts as resumed
        assert came["resumed"] >= there
        assert came["resumed"] + came["received"] == chunks_of(came)
        assert parties.event("a", "receipt")["chunks_sent"] <= chunks_of(came) - there
        assert any(event["works"] for event in parties.events("a", "carrier"))
