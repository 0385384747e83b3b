"""The transport against a broker that does what the test says: it breaks links, and keeps back what a client lives on."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fedcg.wire.messages.envelopes import MAX_ENVELOPE_BYTES
from fedcg.wire.messages.schemas import MAX_MESSAGE_BYTES
from fedcg.wire.transfer.chunks import chunk_bytes_for
from fedcg.wire.transport import mqtt
from fedcg.wire.transport.mqtt import HEADER_BYTES, MqttTransport
from fedcg.wire.transport.mqtt_config import MIN_PACKET_BYTES, Protocol
from fedcg.wire.transport.transport import Delivery, Will
from tests.support.broker import broker_packets as packets
from tests.support.broker.broker_packets import Peer, ScriptedBroker
from tests.support.broker.broker_packets import broker as broker
from tests.support.broker.brokers import DEADLINE_S, Client
from tests.support.waiting import wait_until

Connect = Callable[..., Client]


@pytest.fixture
def connect(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """`connect(*topics, protocol=…, will=…, keepalive_s=…)`: a client that connects to the broker, and again without waiting."""
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(mqtt, "TICK_S", 0.02)
    monkeypatch.setattr(mqtt, "DRAIN_S", 0.2)
    opened: list[Client] = []

    def start(*topics: str, protocol: Protocol = "5", will: Will | None = None, keepalive_s: int = 30) -> Client:
        client = Client(MqttTransport(replace(broker.config(protocol), keepalive_s=keepalive_s), will))
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


@pytest.mark.parametrize(("own_s", "brokers_s"), [(30, 1), (1, 65_535), (1, 0)])
def test_the_shorter_keepalive_counts_and_a_dead_link_is_told_and_connected_anew(
    broker: ScriptedBroker, connect: Connect, own_s: int, brokers_s: int
) -> None:
    client = connect(keepalive_s=own_s)
    broker.welcome(properties=b"\x13" + brokers_s.to_bytes(2, "big")).expect(packets.PINGREQ)
    await_error(client, "a ping was not answered")
    broker.welcome()
    client.await_link(2)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (packets.hang_up(b"\x8b\x00"), "broke: the broker ended it: Server shutting down"),
        (packets.hang_up(), "broke: the broker ended it: Normal disconnection"),
        (b"\x30\xff\xff\x7f", "unexpected data: a packet of 2097151 bytes; at most 50000"),
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
    peer.send(packets.puback(sent[1][0]), last)
    again = broker.welcome()
    assert told in caplog.text
    assert "the MQTT client failed" not in caplog.text  # with a traceback, which is for our own mistakes
    client.await_link(2)
    resent = [again.expect_message() for _ in range(2)]
    assert [payload for _, payload in resent] == [b"1", b"3"]
    # those of the earlier link name nothing now
    again.send(packets.puback(sent[0][0]), packets.puback(0x7000), packets.puback(resent[0][0]))
    wait_until(lambda: client.transport.backlog.messages == 1, "one is acknowledged")
    again.send(packets.puback(resent[1][0]))
    wait_until(lambda: client.transport.backlog.messages == 0, "so is the other")
    assert client.links == [True, False, True]
    assert transport_of(client).last_error is None


def test_a_broker_that_does_not_answer_a_subscription_is_tried_again(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "ANSWER_FACTOR", 0.02)
    client = connect("t")
    for _ in range(2):
        peer = broker.accept()
        peer.expect(packets.CONNECT)
        peer.send(packets.connack())
        peer.expect(packets.SUBSCRIBE)
        assert peer.next() is None
        await_error(client, "does not answer")
    assert client.links == []


@pytest.mark.parametrize(
    "early", [packets.suback("5", 0x8000, b"\x01"), packets.message("5", "t", b"early", 1), packets.puback(1)]
)
def test_nothing_is_accepted_before_the_brokers_answer(broker: ScriptedBroker, connect: Connect, early: bytes) -> None:
    client = connect("t")
    peer = broker.accept()
    peer.expect(packets.CONNECT)
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
    peer.send(packets.puback(peer.expect_message()[0], b"\x97\x00"))
    wait_until(lambda: not publication.is_under_way, "it is done with")
    wait_until(lambda: "refused a publish on t: Quota exceeded" in caplog.text, "it says so")


def test_many_messages_leave_before_the_next_tick(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt, "TICK_S", 2 * DEADLINE_S)
    transport, arrived = MqttTransport(broker.config()), list[Delivery]()

    def send_much(_up: bool) -> None:  # on the transport's own thread, so that one wake-up is for all of it
        for _ in range(300):
            transport.publish("t", b"x", qos=0)

    transport.start(arrived.append, send_much)
    peer = broker.welcome()
    for _ in range(300):
        peer.expect(packets.PUBLISH)
    peer.send(packets.message("5", "t", b"1"))
    wait_until(lambda: bool(arrived), "it has nothing to do again")
    transport.publish("t", b"x", qos=0)  # on another thread
    peer.expect(packets.PUBLISH)
    peer.close()
    transport.close()


OFFERED, GRANTED = "fedcg/1/laws/offer", b"\x01"
SMALL, LARGE = (b"\x27" + size.to_bytes(4, "big") for size in (600, 200_000))


def await_words(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """The log of the machine, where an operator looks, has a line with all of these."""
    wait_until(
        lambda: any(all(word in line for word in words) for line in caplog.text.splitlines()), f"{words}: {caplog.text}"
    )


def grant(peer: Peer, protocol: str = "5", reasons: bytes = GRANTED) -> None:
    peer.send(packets.suback(protocol, int.from_bytes(peer.expect(packets.SUBSCRIBE)[:2], "big"), reasons))


@pytest.mark.parametrize("protocol", ["5", "auto"])
def test_a_link_with_too_small_packets_is_refused_by_name_and_tried_again(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture, protocol: Protocol
) -> None:
    client = connect(OFFERED, protocol=protocol)
    assert broker.welcome(properties=SMALL).next() is None  # no subscription: there is no link
    await_words(caplog, "at most 600 bytes", "max_packet_size", "trying again")
    grant(broker.welcome(properties=LARGE))
    client.await_link()
    assert client.links == [True]
    assert client.transport.max_payload == 200_000 - HEADER_BYTES


def test_the_smallest_link_takes_every_control_message_and_chunks() -> None:
    assert MIN_PACKET_BYTES >= MAX_ENVELOPE_BYTES + HEADER_BYTES > MAX_MESSAGE_BYTES
    assert chunk_bytes_for(MIN_PACKET_BYTES - HEADER_BYTES) > 0


@pytest.mark.parametrize("reasons", [b"\x87", b"", b"\x01\x01"])
def test_a_subscription_that_is_not_granted_ends_the_link_which_is_tried_again(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture, reasons: bytes
) -> None:
    client = connect(OFFERED)
    peer = broker.welcome()
    grant(peer, reasons=reasons)
    assert packets.PUBLISH not in peer.rest()
    await_words(
        caplog, "a subscription", "trying again", f"{OFFERED}: Not authorized" if reasons == b"\x87" else " of 1 "
    )
    assert client.links == []
    grant(broker.welcome())
    client.await_link()


def test_a_broker_that_answers_pings_and_acknowledges_nothing_is_left_and_gets_all_of_it_again(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt, "ACK_S", 1.5)
    client = connect(keepalive_s=1)
    peer = broker.welcome()
    client.await_link()
    sent = [b"%d" % number for number in range(30)]  # more than may be in flight
    for payload in sent:
        client.transport.publish("t", payload)
    pings: list[int] = []

    def answer() -> None:
        while (found := peer.next()) is not None:
            if found[0] == packets.PINGREQ:
                pings.append(packets.PINGREQ)
                peer.send(packets.PONG)

    threading.Thread(target=answer, daemon=True).start()
    wait_until(lambda: client.links == [True, False], "the link is given up")
    assert pings
    await_words(caplog, "has acknowledged no publish", "trying again")
    again, arrived = broker.welcome(), []
    for _ in sent:
        number, payload = again.expect_message()
        arrived.append(payload)
        again.send(packets.puback(number))
    assert arrived == sent
    wait_until(lambda: client.transport.backlog.messages == 0, "all are acknowledged")
    assert client.links == [True, False, True]
