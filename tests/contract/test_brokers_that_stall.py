"""The laws of `Transport` over a broker that answers every packet, and keeps back what a client lives on.

Each case is a connection that looks healthy and is not: too small packets, subscriptions that are not granted, publishes that
are never acknowledged, pings that are not asked for. The broker is a script; only what a user of `Transport` sees is looked at.
"""

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
from tests.support.broker.broker_packets import (
    PINGREQ,
    PONG,
    PUBLISH,
    SUBSCRIBE,
    Peer,
    ScriptedBroker,
    message,
    puback,
    scripted_broker,
    suback,
)
from tests.support.broker.brokers import Client
from tests.support.waiting import wait_until

OFFERED, GRANTED = "fedcg/1/laws/offer", b"\x01"
SMALL, LARGE = (b"\x27" + size.to_bytes(4, "big") for size in (600, 200_000))
Connect = Callable[..., Client]


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker() as made:
        yield made


@pytest.fixture
def connect(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """`connect(*topics, keepalive_s=…)`: a client that connects to the broker, and again without waiting."""
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(mqtt, "TICK_S", 0.02)
    monkeypatch.setattr(mqtt, "DRAIN_S", 0.2)
    opened: list[Client] = []

    def start(*topics: str, protocol: Protocol = "5", keepalive_s: int = 30) -> Client:
        client = Client(MqttTransport(replace(broker.config(protocol), keepalive_s=keepalive_s)))
        for topic in topics:
            client.transport.subscribe(topic)
        opened.append(client.start())
        return client

    yield start
    broker.close()
    for client in opened:
        client.transport.close()


def await_words(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """The log of the machine, where an operator looks, has a line with all of these."""
    wait_until(
        lambda: any(all(word in line for word in words) for line in caplog.text.splitlines()), f"{words}: {caplog.text}"
    )


def grant(peer: Peer, protocol: str = "5", reasons: bytes = GRANTED) -> None:
    peer.send(suback(protocol, int.from_bytes(peer.expect(SUBSCRIBE)[:2], "big"), reasons))


@pytest.mark.parametrize("protocol", ["5", "auto"])
def test_a_link_with_too_small_packets_is_refused_by_name_and_tried_again(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture, protocol: Protocol
) -> None:
    client = connect(OFFERED, protocol=protocol)
    assert broker.welcome(properties=SMALL).next() is None  # no subscription: there is no link
    await_words(caplog, "at most 600 bytes", "max_packet_size", "trying again")
    peer = broker.welcome(properties=LARGE)
    grant(peer)
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
    assert PUBLISH not in peer.rest()
    await_words(
        caplog, "a subscription", "trying again", f"{OFFERED}: Not authorized" if reasons == b"\x87" else " of 1 "
    )
    assert client.links == []
    grant(broker.welcome())
    client.await_link()


@pytest.mark.parametrize("reasons", [b"\x80", None])
def test_a_later_subscription_that_is_refused_or_not_answered_ends_the_link_too(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch, reasons: bytes | None
) -> None:
    monkeypatch.setattr(mqtt, "ACK_S", 0.1)
    client = connect()
    peer = broker.welcome()
    client.await_link()
    client.transport.subscribe(OFFERED)
    if reasons is None:
        peer.expect(SUBSCRIBE)
    else:
        grant(peer, reasons=reasons)
    assert peer.rest() == []
    again = broker.welcome()
    grant(again)
    client.await_link(2)
    assert client.links == [True, False, True]
    again.send(message("5", OFFERED, b"news"))
    client.await_payload(OFFERED, b"news")


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
    pings = answer_pings(peer)
    wait_until(lambda: client.links == [True, False], "the link is given up")
    assert pings
    await_words(caplog, "has acknowledged no publish", "trying again")
    again, arrived = broker.welcome(), []
    for _ in sent:
        number, payload = again.expect_message()
        arrived.append(payload)
        again.send(puback(number))
    assert arrived == sent
    wait_until(lambda: client.transport.backlog.messages == 0, "all are acknowledged")
    assert client.links == [True, False, True]


def test_a_keepalive_longer_than_asked_for_does_not_hide_a_dead_link(broker: ScriptedBroker, connect: Connect) -> None:
    client = connect(keepalive_s=1)
    peer = broker.welcome(properties=b"\x13\xff\xff")
    client.await_link()
    peer.expect(PINGREQ)
    wait_until(lambda: client.links == [True, False], "the silence after the ping ends the link")


def answer_pings(peer: Peer) -> list[int]:
    """Answer every ping from now on, and nothing else; returns the list that grows with each."""
    pings: list[int] = []

    def answer() -> None:
        while (found := peer.next()) is not None:
            if found[0] == PINGREQ:
                pings.append(PINGREQ)
                peer.send(PONG)

    threading.Thread(target=answer, daemon=True).start()
    return pings
