"""A link against a broker that does what the test says, in plain text on loopback."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from fedcg.wire import mqtt_link
from fedcg.wire.mqtt_link import MqttLink
from fedcg.wire.mqtt_packets import Message, Pong, ping, publish
from tests.broker_packets import (
    KEEPALIVE_S,
    PINGREQ,
    PONG,
    PUBLISH,
    Peer,
    ScriptedBroker,
    message,
    scripted_broker,
)
from tests.brokers import DEADLINE_S, wait_until


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker(receive_bytes=16_384) as made:
        yield made


@pytest.fixture
def linked(broker: ScriptedBroker) -> Iterator[tuple[MqttLink, Peer]]:
    """A bare link, and the other end of it."""
    link = MqttLink(broker.config(), None, "5")
    yield link, broker.accept()
    link.close()


def stuff(link: MqttLink) -> bytes:
    """Send until the socket takes no more; what was sent."""
    sent = b""
    while link.has_room:
        data = publish("5", "t", b"%d" % len(sent) * 50_000, 0, retain=False)
        link.send(data)
        link.flush()
        sent += data
    return sent


def has_room(link: MqttLink) -> bool:
    return link.has_room


def test_what_a_broker_does_not_read_waits_and_leaves_in_order(linked: tuple[MqttLink, Peer]) -> None:
    link, peer = linked
    expected = stuff(link)
    for number in range(100):
        link.send(publish("5", "t", b"%d" % number, 0, retain=False))
        expected += publish("5", "t", b"%d" % number, 0, retain=False)
    link.flush()
    assert not has_room(link)
    assert not link._poll.poll(0)  # nothing turns round while nobody reads
    received = bytearray()

    def take() -> None:
        while len(received) < len(expected):
            received.extend(peer.sock.recv(100_000))

    reading = threading.Thread(target=take, daemon=True)
    reading.start()
    began = time.monotonic()
    while not has_room(link):
        link.wait(DEADLINE_S)  # ends as soon as there is room, not when the time is over
        link.flush()
    assert time.monotonic() - began < DEADLINE_S
    reading.join(DEADLINE_S)
    assert received == expected
    assert not link._poll.poll(0)  # nor when everything has left


def test_what_has_left_is_not_held(linked: tuple[MqttLink, Peer]) -> None:
    link, _ = linked
    link.send(bytes(1000))
    link.flush()
    assert link.has_room
    assert not link._leaving.obj


def test_a_broker_that_reads_no_acknowledgement_does_not_fill_the_memory(linked: tuple[MqttLink, Peer]) -> None:
    link, _ = linked
    stuff(link)
    for _ in range(0xFFFF):  # it has no more packet ids than these
        link.send(b"\x40\x02\x00\x01")
    link.send(ping())
    with pytest.raises(ConnectionError, match="does not read"):
        link.send(b"\x40\x02\x00\x01")


def test_packets_come_out_of_one_read_and_a_closed_connection_is_an_error_after_them(
    linked: tuple[MqttLink, Peer],
) -> None:
    link, peer = linked
    assert list(link.read()) == []
    peer.send(PONG, message("5", "t", b"x", 7), PONG)
    peer.close()
    assert not link.wait(DEADLINE_S)
    assert list(link.read()) == [Pong(), Message("t", b"x", retained=False, packet=7), Pong()]
    assert not link.wait(DEADLINE_S)
    with pytest.raises(ConnectionError, match="closed"):
        list(link.read())


def test_no_direction_keeps_the_other_waiting(linked: tuple[MqttLink, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    link, peer = linked
    monkeypatch.setattr(mqtt_link, "READ_BYTES", 20_000)
    sending = threading.Thread(target=peer.send, args=(message("5", "t", bytes(9_000)) * 100,), daemon=True)
    sending.start()
    turns: list[int] = []
    while sum(turns) < 100:
        link.wait(DEADLINE_S)
        turns.append(len(list(link.read())))
    sending.join(DEADLINE_S)
    assert max(turns) < 10


def test_a_watched_descriptor_ends_a_wait_which_says_so(linked: tuple[MqttLink, Peer]) -> None:
    link, peer = linked
    near, far = socket.socketpair()
    with near, far:
        link.watch(far.fileno())
        near.send(b"x")
        assert link.wait(DEADLINE_S)
        peer.send(PONG)
        wait_until(lambda: len(link._poll.poll(0)) == 2, "both are ready")
        assert link.wait(DEADLINE_S)


def test_a_silent_link_is_pinged_and_ends_when_that_is_not_answered(linked: tuple[MqttLink, Peer]) -> None:
    link, peer = linked
    now = time.monotonic()
    link.look_after(now + KEEPALIVE_S - 1)
    link.look_after(now + KEEPALIVE_S + 1)
    link.look_after(now + 2 * KEEPALIVE_S)
    assert peer.expect(PINGREQ) == b""
    with pytest.raises(TimeoutError, match="30 s after a ping"):
        link.look_after(now + 2 * KEEPALIVE_S + 1)
    link.close()
    assert peer.rest() == []


@pytest.mark.parametrize("talks", ["broker", "client"])
def test_a_link_on_which_one_side_alone_talks_is_pinged_and_an_answer_keeps_it(
    linked: tuple[MqttLink, Peer], talks: str
) -> None:
    link, peer = linked
    now = time.monotonic()
    link._sent_at = link._heard_at = now - KEEPALIVE_S - 5
    if talks == "broker":
        hear(link, peer)
    else:
        link.send(publish("5", "t", b"x", 0, retain=False))
        link.flush()
        peer.expect(PUBLISH)
    link.look_after(time.monotonic())
    peer.expect(PINGREQ)
    hear(link, peer)
    link.look_after(time.monotonic() + KEEPALIVE_S + 1)  # an answered ping is followed by another, not by the end
    peer.expect(PINGREQ)


def test_a_link_on_which_both_talk_is_not_pinged(linked: tuple[MqttLink, Peer]) -> None:
    link, peer = linked
    link._sent_at = link._heard_at = time.monotonic() - KEEPALIVE_S - 5
    link.send(publish("5", "t", b"x", 0, retain=False))
    link.flush()
    hear(link, peer)
    link.look_after(time.monotonic())
    link.close()
    assert peer.rest() == [PUBLISH]


def hear(link: MqttLink, peer: Peer) -> None:
    peer.send(PONG)
    link.wait(DEADLINE_S)
    assert list(link.read()) == [Pong()]


def test_a_handshake_that_nobody_answers_ends(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_link, "HANDSHAKE_S", 0.1)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        MqttLink(broker.config(), ssl.create_default_context(), "5")
    assert time.monotonic() - began < DEADLINE_S
    assert broker.accept().sock.recv(1) == b"\x16"  # a TLS handshake was begun
