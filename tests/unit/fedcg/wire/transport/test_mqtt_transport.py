"""The transport against a broker that does what the test says, in plain text on loopback."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedcg.wire.errors import TransportError
from fedcg.wire.transport import mqtt, mqtt_link
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import Protocol
from fedcg.wire.transport.mqtt_link import MqttLink
from fedcg.wire.transport.transport import Will
from tests.support.broker.broker_packets import (
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBLISH,
    SUBSCRIBE,
    ScriptedBroker,
    connack,
    hang_up,
    message,
    packet,
    puback,
    scripted_broker,
    suback,
    text,
)
from tests.support.broker.brokers import DEADLINE_S, Client
from tests.support.waiting import wait_until

Connect = Callable[..., Client]


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker(receive_bytes=16_384) as made:
        yield made


@pytest.fixture
def connect(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """`connect(protocol=…, will=…)`: a transport that connects to the broker, and again without waiting."""
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(mqtt, "DRAIN_S", 0.2)
    opened: list[Client] = []

    def start(protocol: Protocol = "5", will: Will | None = None, *topics: str) -> Client:
        client = Client(MqttTransport(broker.config(protocol), will))
        for topic in topics:
            client.transport.subscribe(topic)
        opened.append(client.start())
        return client

    yield start
    broker.close()  # first, so that nobody waits for its answer
    for client in opened:
        client.transport.close()


def transport_of(client: Client) -> MqttTransport:
    assert isinstance(client.transport, MqttTransport)
    return client.transport


def await_error(client: Client, words: str) -> None:
    wait_until(
        lambda: words in (transport_of(client).last_error or ""), f"{words!r}; {transport_of(client).last_error}"
    )


def test_the_brokers_keepalive_counts_and_a_dead_link_is_told_and_connected_anew(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "TICK_S", 0.02)
    client = connect()
    peer = broker.welcome(properties=b"\x13\x00\x01")
    peer.expect(PINGREQ)
    await_error(client, "a ping was not answered")
    broker.welcome()
    client.await_link(2)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (hang_up(b"\x8b\x00"), "broke: the broker ended it: Server shutting down"),
        (hang_up(), "broke: the broker ended it: Normal disconnection"),
        (packet(0x34, text("t") + b"\x00\x01\x00"), "unexpected data: a message at QoS 2"),
        (b"\x30\xff\xff\x7f", "unexpected data: a packet of 2097151 bytes; at most 50000"),
        (connack(), "unexpected data: a second answer"),
    ],
)
def test_how_a_broker_ends_a_link_is_told_and_what_it_has_not_acknowledged_is_sent_again(
    broker: ScriptedBroker, connect: Connect, last: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    peer = broker.welcome()
    client.await_link()
    for payload in (b"1", b"2", b"3"):
        client.transport.publish("t", payload)
    sent = [peer.expect_message() for _ in range(3)]
    assert [payload for _, payload in sent] == [b"1", b"2", b"3"]
    peer.send(puback(sent[1][0]), last)
    again = broker.welcome()
    assert told in caplog.text
    assert "the MQTT client failed" not in caplog.text  # with a traceback, which is for our own mistakes
    client.await_link(2)
    resent = [again.expect_message() for _ in range(2)]
    assert [payload for _, payload in resent] == [b"1", b"3"]
    again.send(puback(sent[0][0]), puback(0x7000), puback(resent[0][0]))  # those of the earlier link name nothing now
    wait_until(lambda: client.transport.backlog.messages == 1, "one is acknowledged")
    again.send(puback(resent[1][0]))
    wait_until(lambda: client.transport.backlog.messages == 0, "so is the other")
    assert client.links == [True, False, True]
    assert transport_of(client).last_error is None


def test_a_broker_that_does_not_answer_a_subscription_is_tried_again(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "ANSWER_FACTOR", 0.02)
    monkeypatch.setattr(mqtt, "TICK_S", 0.02)
    client = connect("5", None, "t")
    for _ in range(2):
        peer = broker.accept()
        peer.expect(CONNECT)
        peer.send(connack())
        peer.expect(SUBSCRIBE)
        assert peer.next() is None
        await_error(client, "does not answer")
    assert client.links == []


def test_messages_are_acknowledged_in_order_and_delivered(broker: ScriptedBroker, connect: Connect) -> None:
    client = connect()
    peer = broker.welcome()
    peer.send(message("5", "t", b"1", 5), message("5", "t", b"2"), message("5", "t", b"3", 6))
    assert [peer.expect(PUBACK), peer.expect(PUBACK)] == [b"\x00\x05", b"\x00\x06"]
    assert client.payloads("t") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_the_answer_to_another_subscription_does_not_bring_the_link_up(
    broker: ScriptedBroker, connect: Connect, protocol: Protocol
) -> None:
    client = connect(protocol, None, "mine", "others")
    peer = broker.welcome(protocol)
    number = int.from_bytes(peer.expect(SUBSCRIBE)[:2], "big")
    peer.send(suback(protocol, number ^ 1, b"\x01\x01"), message(protocol, "mine", b"x"))
    client.await_payload("mine", b"x")
    assert client.links == []
    peer.send(suback(protocol, number, b"\x01\x00"))
    client.await_link()


@pytest.mark.parametrize("early", [suback("5", 0x8000, b"\x01"), message("5", "t", b"early", 1), puback(1)])
def test_nothing_is_taken_from_a_broker_before_it_answered(
    broker: ScriptedBroker, connect: Connect, early: bytes
) -> None:
    client = connect("5", None, "t")
    peer = broker.accept()
    peer.expect(CONNECT)
    peer.send(early)
    await_error(client, "before")
    assert client.deliveries == []
    assert client.links == []


def test_a_refused_publish_is_logged_and_not_sent_again(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    peer = broker.welcome()
    client.await_link()
    publication = client.transport.publish("t", b"x")
    peer.send(puback(peer.expect_message()[0], b"\x97\x00"))
    wait_until(lambda: not publication.is_under_way, "it is done with")
    wait_until(lambda: "refused a publish on t: Quota exceeded" in caplog.text, "it says so")


WILL = Will("status", b"vanished")


@pytest.mark.parametrize("leave", [MqttTransport.close, MqttTransport.reconnect])
def test_who_leaves_before_the_broker_has_answered_says_good_bye_so_that_there_is_no_will(
    broker: ScriptedBroker, connect: Connect, leave: Callable[[MqttTransport], None]
) -> None:
    client = connect("auto", WILL)
    peer = broker.accept()
    peer.expect(CONNECT)
    leaving = threading.Thread(target=leave, args=(client.transport,), daemon=True)
    leaving.start()
    peer.expect(DISCONNECT)
    peer.close()
    leaving.join()
    if leave is MqttTransport.reconnect:
        broker.welcome()  # with the version it would have taken: nobody has refused it
        client.await_link()
        assert transport_of(client).protocol == "5"


def test_who_connects_anew_ends_the_packet_that_is_on_its_way_and_says_good_bye(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[MqttLink] = []

    class NotedLink(MqttLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            links.append(self)

    monkeypatch.setattr(mqtt, "MqttLink", NotedLink)
    monkeypatch.setattr(mqtt_link, "HANG_UP_S", DEADLINE_S)
    client = connect("5", WILL)
    peer = broker.welcome()
    client.await_link()
    for _ in range(500):  # more than the buffers of both sockets hold
        client.transport.publish("t", bytes(100_000), qos=0)
    wait_until(lambda: links[0].want_write(), "the link is full")
    client.transport.change_will(Will("status", b"other"))
    kinds = []
    while (found := peer.next()) is not None:
        kinds.append(found[0])
        if found[0] == DISCONNECT:
            peer.close()
            break
    assert set(kinds[:-1]) == {PUBLISH}
    assert kinds[-1] == DISCONNECT
    assert len(kinds) < 500
    assert b"other" in broker.accept().expect(CONNECT)


def test_who_always_has_something_to_send_reads_in_between(broker: ScriptedBroker, connect: Connect) -> None:
    client = connect()
    peer = broker.welcome()
    client.await_link()
    over = threading.Event()

    def send_on() -> None:
        while not over.is_set():
            with contextlib.suppress(TransportError):  # the queue is full
                client.transport.publish("t", b"x", qos=0)

    def read_on() -> None:
        with contextlib.suppress(TimeoutError):  # the last packet may have come before `over` was set
            while not over.is_set():
                peer.next()

    threads = [threading.Thread(target=work, daemon=True) for work in (send_on, read_on)]
    for thread in threads:
        thread.start()
    peer.send(message("5", "news", b"1"))
    client.await_payload("news", b"1")
    over.set()
    threads[0].join()


def test_many_messages_leave_without_waiting_for_the_next_tick(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "TICK_S", 2 * DEADLINE_S)
    transport = MqttTransport(broker.config())

    def send_much(_up: bool) -> None:  # on the transport's own thread, so that one wake-up is for all of it
        for _ in range(300):
            transport.publish("t", b"x", qos=0)

    transport.start(lambda _: None, send_much)
    peer = broker.welcome()
    for _ in range(300):
        peer.expect(PUBLISH)
    peer.close()
    transport.close()
