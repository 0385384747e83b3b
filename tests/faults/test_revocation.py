"""A revoked device on a real Mosquitto: its live session is silenced, it can't come back, and the others notice nothing."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.members.membership import evict, revoke
from coordinator.storage.store import Store
from fedcg.wire.transport.mqtt import MqttTransport
from tests.support.broker.broker_plant import FEDERATION, TOPICS, Plant, open_plant
from tests.support.broker.brokers import Client
from tests.support.coordinator.homes import message_key
from tests.support.waiting import free_port, wait_until

WITHIN_S = 60.0
PROBES = 5


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    with open_plant(tmp_path, "run") as made:
        yield made


def exchange(coordinator: Client, device: Client, name: str, word: bytes) -> None:
    """A message each way."""
    device.transport.publish(TOPICS.up_control(name), word)
    coordinator.transport.publish(TOPICS.down_control(name), word)


def arrived(coordinator: Client, device: Client, name: str, word: bytes) -> bool:
    """Whether both messages of `exchange` arrived."""
    return word in coordinator.payloads(TOPICS.up_control(name)) and word in device.payloads(TOPICS.down_control(name))


def has_tried(transport: MqttTransport) -> bool:
    return transport.attempts > 3


def is_refused(plant: Plant, name: str) -> bool:
    """Whether one connection is refused; who comes in the moment between the signal and the reload still gets in, silenced."""
    client = plant.connect(name, wait=False)
    transport = client.transport
    assert isinstance(transport, MqttTransport)
    wait_until(lambda: bool(client.links) or transport.attempts > 1, "an answer")
    transport.close()
    return client.links == []


@pytest.mark.broker
def test_a_live_session_is_silenced_within_a_minute_and_never_comes_back_while_others_go_on(plant: Plant) -> None:
    coordinator, bad, good = plant.connect("coordinator"), plant.connect("a"), plant.connect("b")
    for name, client in (("a", bad), ("b", good)):
        exchange(coordinator, client, name, b"before")
        wait_until(partial(arrived, coordinator, client, name, b"before"), f"{name} works")
    revoked = plant.command("device", "revoke", "a", "--reason", "stolen", "--json")
    assert '"broker_reloaded": true' in revoked
    end = time.monotonic() + WITHIN_S
    number, silent = 0, 0
    while silent < PROBES:  # so many exchanges in a row in which only the good device's messages arrive
        number += 1
        word = f"after-{number}".encode()
        if bad.links[-1]:
            exchange(coordinator, bad, "a", word)
        exchange(coordinator, good, "b", word)
        wait_until(partial(arrived, coordinator, good, "b", word), "the other device goes on")
        leaked = word in coordinator.payloads(TOPICS.up_control("a"))  # it may read its own topic, where it is told
        silent = 0 if leaked else silent + 1
        assert time.monotonic() < end, "the revoked device's messages still pass"
    assert good.links == [True]
    assert coordinator.links == [True]

    bad.transport.close()
    again = plant.connect("a", wait=False)
    assert isinstance(again.transport, MqttTransport)
    wait_until(partial(has_tried, again.transport), "it tries to come back")
    assert again.links == []
    received = len(coordinator.payloads(TOPICS.up_control("a")))
    exchange(coordinator, good, "b", b"last")
    wait_until(lambda: arrived(coordinator, good, "b", b"last"), "the other device goes on")
    assert len(coordinator.payloads(TOPICS.up_control("a"))) == received
    assert good.links == [True]


@pytest.mark.broker
def test_two_revocations_in_one_second_both_hold(plant: Plant) -> None:
    for name in ("a", "b"):
        plant.connect(name)
    store = Store(plant.home.database)
    for name in ("a", "b"):
        assert revoke(plant.home, store, name, "", time.time()).broker_reloaded
    store.close()
    for name in ("a", "b"):
        wait_until(partial(is_refused, plant, name), f"the broker has read its lists and refuses {name}", WITHIN_S)
        again = plant.connect(name, wait=False)
        assert isinstance(again.transport, MqttTransport)
        wait_until(partial(has_tried, again.transport), f"{name} tries to come back", WITHIN_S)
        assert again.links == []


@pytest.mark.broker
def test_the_session_of_a_replaced_box_is_ended_although_the_new_one_has_its_name(plant: Plant) -> None:
    coordinator, old = plant.connect("coordinator"), plant.connect("a")
    exchange(coordinator, old, "a", b"before")
    wait_until(lambda: arrived(coordinator, old, "a", b"before"), "it works")
    assert evict(plant.home, "a", message_key(plant.home, "a"), [FEDERATION])
    wait_until(lambda: False in old.links, "its session ends")


def test_no_broker_means_no_session_to_end(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    assert not evict(home, "a", "aa" * 32, [FEDERATION])
    assert list(home.root.glob("evict-*")) == []
