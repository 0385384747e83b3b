"""Transfers over MQTT and HTTPS whose agents, coordinator, broker or link die, stall or have a wrong clock: the round completes, nothing counts twice, and what had arrived is not sent again.

A machine's clock is wrong relative to the certificates, so these tests make certificates at another time, and a real Mosquitto and real TLS judge them.
"""

import asyncio
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from coordinator.service.service import Service
from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import AgentConfig, BrokerSection, DataSection, TlsSection
from fedcg.wire.messages.schemas import COORDINATOR, Carrier
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import HOST, Pki, RunningMosquitto, acl_for, mqtt_client
from tests.support.broker.throttle import Weather
from tests.support.waiting import free_port, wait_until
from tests.support.wire.transfer_parties import (
    FEDERATION,
    SOME,
    MakeWorld,
    Parties,
    chunks_of,
    prepared,
    run_agent,
    run_coordinator,
    worlds,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(200)]
WINDOWS = {Carrier.MQTT: 17, Carrier.HTTPS: 64}  # chunks that were under way when something died: lost or repeated
BOTH_CARRIERS = pytest.mark.parametrize("make_world", [Carrier.MQTT, Carrier.HTTPS], indirect=True)
OVER_HTTPS = pytest.mark.parametrize("make_world", [Carrier.HTTPS], indirect=True)


@pytest.fixture
def make_world(request: pytest.FixtureRequest, tmp_path: Path, mosquitto: StartMosquitto) -> Iterator[MakeWorld]:
    with worlds(tmp_path, mosquitto, getattr(request, "param", Carrier.MQTT)) as make:
        yield make


@BOTH_CARRIERS
@pytest.mark.parametrize("victim", ["a", COORDINATOR])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.slow
def test_whoever_is_killed_mid_transfer_only_the_rest_is_carried(make_world: MakeWorld, way: str, victim: str) -> None:
    world = make_world()
    parties, window = world.parties, WINDOWS[world.carrier]
    count = parties.uploaded if way == "up" else parties.downloaded
    there = parties.await_chunks(lambda: count("a"), SOME, f"the transfer {way} is under way")
    parties.kill(victim)
    if victim == "a":
        there = max(there, count("a"))
    parties.start(victim)
    stored = world.finish()
    came = stored if way == "up" else world.download()
    receiver_died = (way == "down") == (victim == "a")
    assert came["resumed"] >= there if receiver_died else came["resumed"] == 0
    assert came["resumed"] + came["received"] == chunks_of(came) > there
    if way == "up":  # the agent's second process sends the rest alone; a new coordinator gets what was under way again
        sent, repeated = parties.event("a", "receipt")["chunks_sent"], came["repeated"]
        assert sent <= chunks_of(came) - there if victim == "a" else max(sent - chunks_of(came), repeated) <= window
    assert len(parties.events("a", "agent_started")) == 1 + (victim == "a")


@BOTH_CARRIERS
@pytest.mark.slow
def test_a_transfer_completes_over_a_slow_and_unreliable_link(make_world: MakeWorld) -> None:
    weather = Weather(
        bytes_per_s=8_000, delay_s=0.5, jitter_s=0.2, stalls=0.02, stall_s=(0.2, 3.0), reset_after=(24_000,)
    )
    world = make_world(weather, size=24_000, chunk_bytes=2048, keepalive_s=30)
    came = world.finish()
    assert came["received"] + came["resumed"] == -(-came["size"] // (2048 - FRAME_OVERHEAD_BYTES))
    assert world.link.resets == 1


def run_to_the_end(root: Path, mosquitto: StartMosquitto, **plan: Any) -> Parties:
    """A federation of a and b without any weather, on threads of this process."""
    broker = mosquitto(acl_for(FEDERATION))
    root.mkdir()
    ports = {"a": broker.port, "b": broker.port}
    services: queue.SimpleQueue[Service] = queue.SimpleQueue()
    with prepared(root, broker, ports, size=300_000, **plan) as parties, ThreadPoolExecutor(3) as threads:
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
        assert sorted(event["client"] for event in parties.events(COORDINATOR, "update_stored")) == ["a", "b"]


@OVER_HTTPS
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


TEN_YEARS = timedelta(days=3652)
TEN_MINUTES = timedelta(minutes=10)


def made_at(when: datetime, folder: Path, mosquitto: StartMosquitto) -> RunningMosquitto:
    """A broker whose whole authority was made at another time than this machine's clock shows."""
    authority = Pki.create(folder / "pki", (COORDINATOR, "a", "b"), when)
    return mosquitto(acl_for(FEDERATION), authority=authority)


def diagnosed(broker: RunningMosquitto, folder: Path, now: datetime) -> dict[str, Finding]:
    tls = broker.pki.tls("a")
    config = AgentConfig(
        federation=FEDERATION,
        device="a",
        store=folder / "store",
        broker=BrokerSection(host=HOST, port=broker.port),
        tls=TlsSection(ca=tls.ca, cert=tls.cert, key=tls.key),
        data=DataSection(root=folder),
    )
    return {finding.check: finding for finding in examine(config, now)}


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(-TEN_YEARS, "not valid yet"), (TEN_YEARS, "has expired")],
    ids=["ten years behind", "ten years ahead"],
)
def test_a_clock_that_is_ten_years_off_is_refused_and_agent_and_doctor_name_it_and_the_fix(
    tmp_path: Path, mosquitto: StartMosquitto, ahead: timedelta, said: str
) -> None:
    now = datetime.now(timezone.utc)
    broker = made_at(now - ahead, tmp_path, mosquitto)
    client = mqtt_client(broker.config("a")).start()
    wait_until(lambda: getattr(client.transport, "last_error", None) is not None, "the connection fails")
    client.transport.close()
    error = getattr(client.transport, "last_error", "")
    found = diagnosed(broker, tmp_path, now)
    for message in (error, found["broker"].detail):
        assert said in message
        assert f"clock, which shows {now:%Y-%m-%d}" in message
        assert "timedatectl set-ntp true" in message
    for check in ("clock", "certificate", "broker"):
        assert found[check].state == "failed", found[check]
    assert "timedatectl set-ntp true" in found["clock"].advice
    assert f"{now:%Y-%m-%d}" in found["clock"].detail
    assert client.links == []


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [-TEN_MINUTES, TEN_MINUTES], ids=["ten minutes behind", "ten minutes ahead"])
def test_a_round_completes_when_a_boxs_clock_is_ten_minutes_off(
    tmp_path: Path, mosquitto: StartMosquitto, ahead: timedelta
) -> None:
    """The coordinator and its authority live in the right time, the agent `ahead` of it."""
    now = datetime.now(timezone.utc)
    broker = made_at(now - ahead, tmp_path, mosquitto)
    ahead_s = -ahead.total_seconds()
    with prepared(tmp_path, broker, {"a": broker.port}, size=20_000, coordinator_ahead_s=ahead_s) as parties:
        parties.start_all()
        parties.wait_finished()
        (receipt,) = parties.events("a", "receipt")
        assert receipt["outcome"] == "accepted"
        assert len(parties.events(COORDINATOR, "update_stored")) == 1
        assert diagnosed(broker, tmp_path, now)["clock"].state == "ok"
        assert diagnosed(broker, tmp_path, now)["broker"].state == "ok"
