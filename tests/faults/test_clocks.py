"""Wrong clocks. A machine's clock is wrong relative to the certificates, so these tests make certificates at another time, and a
real Mosquitto and real TLS judge them; in the protocol only a device's report of itself is compared with a second clock."""

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import AgentConfig, BrokerSection, DataSection, TlsSection
from fedcg.wire.messages.schemas import COORDINATOR
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import HOST, Client, Pki, RunningMosquitto, acl_for, mqtt_client
from tests.support.waiting import wait_until
from tests.support.wire.transfer_parties import FEDERATION, Parties, Plan

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]
TEN_YEARS = timedelta(days=3652)
TEN_MINUTES = timedelta(minutes=10)


def made_at(when: datetime, folder: Path, mosquitto: StartMosquitto) -> RunningMosquitto:
    """A broker whose whole authority was made at another time than this machine's clock shows."""
    authority = Pki.create(folder / "pki", (COORDINATOR, "a", "b"), when)
    return mosquitto(acl_for(FEDERATION), authority=authority)


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for client in made:
        client.transport.close()


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
    tmp_path: Path, mosquitto: StartMosquitto, clients: list[Client], ahead: timedelta, said: str
) -> None:
    now = datetime.now(timezone.utc)
    broker = made_at(now - ahead, tmp_path, mosquitto)
    clients.append(mqtt_client(broker.config("a")).start())
    wait_until(lambda: getattr(clients[0].transport, "last_error", None) is not None, "the connection fails")
    error = getattr(clients[0].transport, "last_error", "")
    found = diagnosed(broker, tmp_path, now)
    for message in (error, found["broker"].detail):
        assert said in message
        assert f"clock, which shows {now:%Y-%m-%d}" in message
        assert "timedatectl set-ntp true" in message
    for check in ("clock", "certificate", "broker"):
        assert found[check].state == "failed", found[check]
    assert "timedatectl set-ntp true" in found["clock"].advice
    assert f"{now:%Y-%m-%d}" in found["clock"].detail
    assert clients[0].links == []


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [-TEN_MINUTES, TEN_MINUTES], ids=["ten minutes behind", "ten minutes ahead"])
def test_a_round_completes_when_a_boxs_clock_is_ten_minutes_off(
    tmp_path: Path, mosquitto: StartMosquitto, ahead: timedelta
) -> None:
    """The coordinator and its authority live in the right time, the agent `ahead` of it."""
    now = datetime.now(timezone.utc)
    broker = made_at(now - ahead, tmp_path, mosquitto)
    plan = Plan(
        str(broker.pki.directory), broker.port, {"a": broker.port}, 20_000, coordinator_ahead_s=-ahead.total_seconds()
    )
    parties = Parties(tmp_path, plan)
    parties.prepare()
    try:
        parties.start_all()
        parties.wait_finished()
        (receipt,) = parties.events("a", "receipt")
        assert receipt["outcome"] == "accepted"
        assert len(parties.events(COORDINATOR, "update_stored")) == 1
        assert diagnosed(broker, tmp_path, now)["clock"].state == "ok"
        assert diagnosed(broker, tmp_path, now)["broker"].state == "ok"
    finally:
        parties.stop()
