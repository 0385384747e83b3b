"""A revoked device on real brokers: its live session is silenced, it can't come back, and the others notice nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.enrolment import enrol
from coordinator.home import Home, create_home
from coordinator.provision.pki import CA_NAME, credential_of
from coordinator.records import AggregateRecord, FederationRecord
from coordinator.revocation import evict
from coordinator.store import Store
from fedcg.broker_path import find_mosquitto
from fedcg.wire.mqtt import MqttTransport
from fedcg.wire.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.topics import Topics
from tests.brokers import Client, free_port, wait_until

BROKERS = [pytest.param("mosquitto", marks=pytest.mark.broker), "amqtt"]
TOPICS = Topics("casting")
WITHIN_S = 60.0
PROBES = 5


@dataclass
class Plant:
    """A broker of a home in a process of its own, and connections to it."""

    root: Path
    home: Home
    process: subprocess.Popen[bytes]
    clients: list[Client]

    def connect(self, name: str, *, wait: bool = True) -> Client:
        folder = self.root / "bundles" / name / "tls"
        tls = TlsFiles(folder / "ca.pem", folder / "device.pem", folder / "device.key")
        if not folder.exists():
            own = credential_of(self.home.pki, name)
            tls = TlsFiles(credential_of(self.home.pki, CA_NAME).certificate, own.certificate, own.key)
        port = self.home.config().broker.port
        client = Client(MqttTransport(MqttConfig("127.0.0.1", port, name, tls=tls, protocol="3.1.1")))
        for topic in (
            (TOPICS.all_up_control(), TOPICS.all_status()) if name == "coordinator" else (TOPICS.down_control(name),)
        ):
            client.transport.subscribe(topic)
        self.clients.append(client)
        client.start()
        return client.await_link() if wait else client

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedcg", *arguments, "--dir", str(self.home.root)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(params=BROKERS)
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plant]:
    kind = request.param
    if kind == "mosquitto" and find_mosquitto() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Mosquitto is missing, in CI it must be there")
        pytest.skip("no Mosquitto; `make setup-broker` puts one in place")
    home = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    store = Store(home.database)
    record = FederationRecord("casting", "fedcg", "5" * 64, 3, 2, 2, 100.0, 1, 1.0)
    store.add_federation(record, AggregateRecord("casting", 0, 0, "0" * 64, 10, "e" * 64, 1.0))
    enrol(home, store, ["a", "b"], tmp_path / "bundles", time.time())
    store.close()
    wanted = "auto" if kind == "mosquitto" else kind
    with (tmp_path / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedcg", "broker", "run", "--dir", str(home.root), "--broker", wanted],
            stdout=log,
            stderr=log,
        )
    made = Plant(tmp_path, home, process, [])
    try:
        wait_until(lambda: "ready" in (tmp_path / "broker.log").read_text(), "the broker is ready", 30)
        yield made
    finally:
        for client in made.clients:
            client.transport.close()
        process.terminate()
        process.wait(timeout=20)


def exchange(coordinator: Client, device: Client, name: str, word: bytes) -> None:
    """A message each way."""
    device.transport.publish(TOPICS.up_control(name), word)
    coordinator.transport.publish(TOPICS.down_control(name), word)


def is_heard(coordinator: Client, device: Client, name: str, word: bytes) -> bool:
    """Whether both messages of `exchange` arrived."""
    return word in coordinator.payloads(TOPICS.up_control(name)) and word in device.payloads(TOPICS.down_control(name))


def has_tried(transport: MqttTransport) -> bool:
    return transport.attempts > 3


def test_a_live_session_is_silenced_within_a_minute_and_never_comes_back_while_others_go_on(plant: Plant) -> None:
    coordinator, bad, good = plant.connect("coordinator"), plant.connect("a"), plant.connect("b")
    for name, client in (("a", bad), ("b", good)):
        exchange(coordinator, client, name, b"before")
        wait_until(partial(is_heard, coordinator, client, name, b"before"), f"{name} works")
    revoked = plant.command("device", "revoke", "a", "--reason", "stolen", "--json")
    assert '"broker_reloaded": true' in revoked
    end = time.monotonic() + WITHIN_S
    number, silent = 0, 0
    while silent < PROBES:  # so many exchanges in a row in which the good device is heard and the bad one is not
        number += 1
        word = f"after-{number}".encode()
        if bad.links[-1]:
            exchange(coordinator, bad, "a", word)
        exchange(coordinator, good, "b", word)
        wait_until(partial(is_heard, coordinator, good, "b", word), "the other device goes on")
        leaked = word in coordinator.payloads(TOPICS.up_control("a")) or word in bad.payloads(TOPICS.down_control("a"))
        silent = 0 if leaked else silent + 1
        assert time.monotonic() < end, "the revoked device is still heard"
    assert good.links == [True]
    assert coordinator.links == [True]

    bad.transport.close()
    again = plant.connect("a", wait=False)
    assert isinstance(again.transport, MqttTransport)
    wait_until(partial(has_tried, again.transport), "it tries to come back")
    assert again.links == []
    heard = len(coordinator.payloads(TOPICS.up_control("a")))
    exchange(coordinator, good, "b", b"last")
    wait_until(lambda: is_heard(coordinator, good, "b", b"last"), "the other device goes on")
    assert len(coordinator.payloads(TOPICS.up_control("a"))) == heard
    assert good.links == [True]


def test_two_revocations_in_one_second_both_hold(plant: Plant) -> None:
    for name in ("a", "b"):
        plant.connect(name)
    from coordinator.revocation import revoke

    store = Store(plant.home.database)
    for name in ("a", "b"):
        assert revoke(plant.home, store, name, "", time.time()).broker_reloaded
    store.close()
    for name in ("a", "b"):
        again = plant.connect(name, wait=False)
        assert isinstance(again.transport, MqttTransport)
        wait_until(partial(has_tried, again.transport), f"{name} tries to come back")
        assert again.links == []


def test_the_session_of_a_replaced_box_is_ended_although_the_new_one_has_its_name(plant: Plant) -> None:
    coordinator, old = plant.connect("coordinator"), plant.connect("a")
    exchange(coordinator, old, "a", b"before")
    wait_until(lambda: is_heard(coordinator, old, "a", b"before"), "it works")
    assert evict(plant.home, "a")
    wait_until(lambda: False in old.links, "its session ends")


def test_no_broker_means_no_session_to_end(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", CoordinatorConfig(broker=BrokerSettings(port=free_port())))
    assert not evict(home, "a")
    assert list(home.root.glob("evict-*")) == []
