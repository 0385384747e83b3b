"""The laws of `fedcg.wire.transport.transport.Transport`, on every broker: each has a bench that connects clients and cuts and mends single links."""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.transport.mqtt_config import Protocol as MqttVersion
from fedcg.wire.transport.transport import Delivery, Will
from tests.support.broker.brokers import HOST, Client, Intruder, Pki, RunningMosquitto, acl_for
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.broker.throttle import Throttle
from tests.support.coordinator.world import rules_of
from tests.support.waiting import wait_until


class MemoryBench:
    def __init__(self, topics: Topics) -> None:
        self._broker = MemoryBroker(rules_of(topics.federation))
        self._clients: list[Client] = []

    def connect(self, identity: str, will: Will | None = None, *, intrudes: bool = False) -> Client:
        self._clients.append(Client(MemoryTransport(self._broker, identity, will)))
        return self._clients[-1]

    def cut(self, identity: str) -> None:
        self._broker.drop(identity)

    def mend(self, identity: str) -> None:
        self._broker.restore(identity)

    def close(self) -> None:
        for client in self._clients:
            client.transport.close()


class MqttBench:
    """Each client reaches the broker through a relay of its own, so that its link can be cut alone."""

    def __init__(self, port: int, pki: Pki, version: MqttVersion) -> None:
        self._port = port
        self._pki = pki
        self._version = version
        self._relays: dict[str, Throttle] = {}
        self._clients: list[Client] = []

    def connect(self, identity: str, will: Will | None = None, *, intrudes: bool = False) -> Client:
        relay = self._relays.setdefault(identity, Throttle(self._port))
        tls: TlsFiles = self._pki.tls(identity)
        config = MqttConfig(HOST, relay.port, identity, tls=tls, protocol=self._version)
        self._clients.append(Client((Intruder if intrudes else MqttTransport)(config, will)))
        return self._clients[-1]

    def cut(self, identity: str) -> None:
        self._relays[identity].cut()

    def mend(self, identity: str) -> None:
        self._relays[identity].mend()

    def close(self) -> None:
        for client in self._clients:
            client.transport.close()
        for relay in self._relays.values():
            relay.close()


Bench = MemoryBench | MqttBench


TOPICS = Topics("laws")
VERSIONS: dict[str, MqttVersion] = {"mosquitto-5": "5", "mosquitto-3.1.1": "3.1.1"}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def laws_mosquitto(mosquitto: Callable[[str], RunningMosquitto]) -> RunningMosquitto:
    return mosquitto(acl_for(TOPICS.federation))


@pytest.fixture(
    params=[
        "memory",
        pytest.param("mosquitto-5", marks=pytest.mark.broker),
        pytest.param("mosquitto-3.1.1", marks=pytest.mark.broker),
    ]
)
def bench(request: pytest.FixtureRequest, pki: Pki) -> Iterator[Bench]:
    made: Bench
    if request.param == "memory":
        made = MemoryBench(TOPICS)
    else:
        made = MqttBench(request.getfixturevalue("laws_mosquitto").port, pki, VERSIONS[request.param])
    yield made
    made.close()


def unique(text: str) -> bytes:
    """A payload that no other test has published on a broker that several tests share."""
    return f"{text} {next(_NUMBERS)}".encode()


def listening(bench: Bench, identity: str, *topics: str, intrudes: bool = False) -> Client:
    client = bench.connect(identity, intrudes=intrudes)
    for topic in topics:
        client.transport.subscribe(topic)
    return client.start().await_link()


def fence(bench: Bench, reader: Client, topic: str, writer: Client) -> None:
    """Wait until something published now has arrived, so that what was published before has, too, or never will."""
    mark = unique("fence")
    writer.transport.publish(topic, mark)
    reader.await_payload(topic, mark)


@pytest.mark.parametrize("qos", [0, 1])
def test_many_large_messages_arrive_in_order_and_once(bench: Bench, qos: int) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.up_chunk("+"))
    device = bench.connect("a").start().await_link()
    payloads = [unique("chunk").ljust(100_000, b".") for _ in range(40)]
    for payload in payloads:
        device.transport.publish(TOPICS.up_chunk("a"), payload, qos=qos)
    wait_until(lambda: len(coordinator.payloads(TOPICS.up_chunk("a"))) >= 40, "all chunks arrive")
    assert coordinator.payloads(TOPICS.up_chunk("a")) == payloads


def test_a_subscriber_gets_the_retained_message_marked_as_such(bench: Bench) -> None:
    coordinator = bench.connect("coordinator").start().await_link()
    witness = listening(bench, "observer", TOPICS.offer)
    payload = unique("retained offer")
    coordinator.transport.publish(TOPICS.offer, payload, retain=True)
    witness.await_payload(TOPICS.offer, payload)
    late = listening(bench, "a", TOPICS.offer)
    late.await_payload(TOPICS.offer, payload)
    assert [delivery.retained for delivery in late.deliveries if delivery.payload == payload] == [True]
    assert [delivery.retained for delivery in witness.deliveries if delivery.payload == payload] == [False]


def test_a_subscription_made_while_connected_takes_effect(bench: Bench) -> None:
    coordinator = bench.connect("coordinator").start().await_link()
    kept = unique("kept")
    coordinator.transport.publish(TOPICS.coordinator, kept, retain=True)
    device = bench.connect("a").start().await_link()
    device.transport.subscribe(TOPICS.coordinator)
    device.await_payload(TOPICS.coordinator, kept)


def test_what_a_device_or_an_observer_publishes_where_it_may_not_reaches_no_subscriber(bench: Bench) -> None:
    observer = listening(bench, "observer", TOPICS.everything())
    coordinator = listening(bench, "coordinator", TOPICS.up_control("+"), TOPICS.offer)
    intruder = bench.connect("b").start().await_link()
    forged = unique("forged")
    for topic in (TOPICS.offer, TOPICS.aggregate, TOPICS.coordinator, TOPICS.up_control("a"), TOPICS.status("a")):
        intruder.transport.publish(topic, forged)
        intruder.transport.publish(topic, forged, retain=True)
    for topic in (TOPICS.offer, TOPICS.up_control("a")):
        observer.transport.publish(topic, forged)
    for reader in (observer, coordinator):
        fence(bench, reader, TOPICS.up_control("b"), intruder)
        assert forged not in [delivery.payload for delivery in reader.deliveries]


def test_subscriptions_survive_a_broken_link_without_a_new_call(bench: Bench) -> None:
    coordinator = bench.connect("coordinator").start().await_link()
    device = listening(bench, "a", TOPICS.down_control("a"))
    bench.cut("a")
    wait_until(lambda: device.links == [True, False], f"the loss is reported: {device.links}")
    bench.mend("a")
    device.await_link(2)
    payload = unique("after the break")
    coordinator.transport.publish(TOPICS.down_control("a"), payload)
    device.await_payload(TOPICS.down_control("a"), payload)
    assert device.links == [True, False, True]


def test_the_link_is_reported_up_only_when_the_subscriptions_stand(bench: Bench) -> None:
    coordinator = bench.connect("coordinator").start().await_link()
    device = bench.connect("a")
    device.transport.subscribe(TOPICS.down_control("a"))
    payload = unique("at link-up")

    def answer_link(up: bool) -> None:
        if up:
            coordinator.transport.publish(TOPICS.down_control("a"), payload)

    device.transport.start(device.deliveries.append, answer_link)
    device.await_payload(TOPICS.down_control("a"), payload)


def test_publishing_without_a_link_is_refused_and_works_again_with_one(bench: Bench) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.up_control("+"))
    device = bench.connect("a")
    with pytest.raises(TransportError):
        device.transport.publish(TOPICS.up_control("a"), b"too early")
    device.start().await_link()
    bench.cut("a")
    wait_until(lambda: device.links == [True, False], "the loss is reported")
    with pytest.raises(TransportError):
        device.transport.publish(TOPICS.up_control("a"), b"while down")
    bench.mend("a")
    device.await_link(2)
    payload = unique("again")
    device.transport.publish(TOPICS.up_control("a"), payload)
    coordinator.await_payload(TOPICS.up_control("a"), payload)
    assert b"while down" not in coordinator.payloads(TOPICS.up_control("a"))


def test_a_payload_of_the_largest_size_passes_and_a_larger_one_is_refused(bench: Bench) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.up_chunk("+"))
    device = bench.connect("a").start().await_link()
    largest = device.transport.max_payload
    assert 120 * 1024 < largest < 2_000_000
    with pytest.raises(TransportError, match=str(largest)):
        device.transport.publish(TOPICS.up_chunk("a"), b"x" * (largest + 1))
    device.transport.publish(TOPICS.up_chunk("a"), b"x" * largest)
    coordinator.await_payload(TOPICS.up_chunk("a"), b"x" * largest)
    assert device.links == [True]


def test_the_will_is_published_and_kept_when_a_client_vanishes(bench: Bench) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.status("+"))
    last_words = unique("gone")
    bench.connect("a", Will(TOPICS.status("a"), last_words)).start().await_link()
    bench.cut("a")
    coordinator.await_payload(TOPICS.status("a"), last_words)
    late = listening(bench, "observer", TOPICS.status("+"))
    late.await_payload(TOPICS.status("a"), last_words)


def test_a_changed_will_is_left_from_then_on_and_the_change_publishes_neither(bench: Bench) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.status("+"))
    old, new = unique("old will"), unique("new will")
    device = bench.connect("a", Will(TOPICS.status("a"), old)).start().await_link()
    device.transport.change_will(Will(TOPICS.status("a"), new))
    device.await_link(2)
    assert {old, new}.isdisjoint(coordinator.payloads(TOPICS.status("a")))
    bench.cut("a")
    coordinator.await_payload(TOPICS.status("a"), new)
    assert old not in coordinator.payloads(TOPICS.status("a"))


def test_a_client_that_closes_leaves_no_will_and_receives_nothing_more(bench: Bench) -> None:
    coordinator = listening(bench, "coordinator", TOPICS.status("+"), TOPICS.up_control("+"))
    last_words = unique("should not be published")
    device = bench.connect("a", Will(TOPICS.status("a"), last_words))
    device.transport.subscribe(TOPICS.offer)
    device.start().await_link()
    device.transport.publish(TOPICS.up_control("a"), goodbye := unique("goodbye"))
    device.transport.close()
    coordinator.await_payload(TOPICS.up_control("a"), goodbye)
    received = len(device.deliveries)
    other = bench.connect("b").start().await_link()
    coordinator.transport.publish(TOPICS.offer, unique("after close"))
    fence(bench, coordinator, TOPICS.up_control("b"), other)
    assert last_words not in coordinator.payloads(TOPICS.status("a"))
    assert len(device.deliveries) == received


def test_callbacks_run_on_the_transports_thread_and_may_fail(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = bench.connect("coordinator").start().await_link()
    received: list[Delivery] = []
    threads: set[int] = set()

    def stumble(delivery: Delivery) -> None:
        threads.add(threading.get_ident())
        received.append(delivery)
        raise ValueError("a callback of the user failed")

    device = bench.connect("a")
    device.transport.subscribe(TOPICS.down_control("a"))
    up = threading.Event()
    device.transport.start(stumble, lambda _: up.set())
    wait_until(up.is_set, "the device is connected")
    for payload in (first := unique("first"), second := unique("second")):
        coordinator.transport.publish(TOPICS.down_control("a"), payload)
    wait_until(lambda: len(received) >= 2, "both arrive although the callback fails")
    assert [delivery.payload for delivery in received] == [first, second]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert "a callback of the user failed" in caplog.text
