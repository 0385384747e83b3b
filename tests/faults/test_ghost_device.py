"""A device dies together with a broker that keeps nothing, so its will is never published: its heartbeats are missed, and no later round waits for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.wire.messages.schemas import COORDINATOR
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import RunningMosquitto, acl_for
from tests.support.broker.throttle import Throttle, Weather
from tests.support.waiting import wait_until
from tests.support.wire.transfer_parties import FEDERATION, Parties, Plan

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(200)]
DEADLINE_S = 25.0  # longer than the three heartbeats of 5 s after which a device is missed
GHOST = "c"


@pytest.fixture
def broker(mosquitto: StartMosquitto) -> RunningMosquitto:
    return mosquitto(acl_for(FEDERATION))  # without persistence: sessions and wills die with it


@pytest.fixture
def parties(tmp_path: Path, broker: RunningMosquitto) -> Iterator[Parties]:
    slow = Throttle(broker.port, Weather(bytes_per_s=20_000))  # so that it has not delivered when it dies
    ports = {"a": broker.port, "b": broker.port, GHOST: slow.port}
    plan = Plan(str(broker.pki.directory), broker.port, ports, 400_000, rounds=3, min_clients=2, deadline_s=DEADLINE_S)
    made = Parties(tmp_path, plan)
    made.prepare()
    yield made
    made.stop()
    slow.close()


def test_a_ghost_is_missed_by_its_heartbeats_and_holds_no_round_to_its_deadline(
    parties: Parties, broker: RunningMosquitto
) -> None:
    parties.start(COORDINATOR)
    for name in ("a", GHOST):
        parties.start(name)
    parties.event(COORDINATOR, "attempt_opened", "with the ghost, who has to deliver")
    wait_until(lambda: GHOST in {event["client"] for event in parties.events(COORDINATOR, "online")}, "the ghost came")
    broker.stop()  # SIGKILL, and the device before it can come back: its will is not published
    parties.kill(GHOST)
    broker.start()
    missed = parties.event(COORDINATOR, "offline", "the ghost is missed")
    assert (missed["client"], missed["reason"]) == (GHOST, "it missed its heartbeats")
    parties.start("b")
    del parties.plan.agent_ports[GHOST]
    parties.wait_finished()

    opened = parties.events(COORDINATOR, "attempt_opened")
    assert GHOST in opened[0]["participants"]
    later = opened[1:]
    assert [(event["round"], event["participants"]) for event in later] == [(n, ["a", "b"]) for n in (1, 2, 3)]
    ended = {event["round"]: event["t"] for event in parties.events(COORDINATOR, "aggregate_stored")}
    for event in later:
        assert ended[event["round"]] - event["t"] < DEADLINE_S / 2, "the round did not wait"
