"""A link against a broker that does what the test says, in plain text on loopback; its bounds fail visibly if paho reads otherwise."""

import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fedcg.wire.errors import MalformedError
from fedcg.wire.tls import ServerRole, expect_role
from fedcg.wire.transport import mqtt_link
from fedcg.wire.transport.mqtt_link import MqttLink
from tests.support.broker.broker_packets import (
    CONNECT,
    PINGREQ,
    PONG,
    PUBACK,
    Peer,
    ScriptedBroker,
    connack,
    message,
    scripted_broker,
    text,
)
from tests.support.broker.brokers import DEADLINE_S


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker(receive_bytes=16_384) as made:
        yield made


@pytest.fixture
def wake() -> Iterator[socket.socket]:
    """What ends a wait; the other end of it is in a test's hands."""
    near, far = socket.socketpair()
    with near, far:
        yield near


@pytest.fixture
def linked(broker: ScriptedBroker, wake: socket.socket) -> Iterator[tuple[MqttLink, Peer]]:
    """An accepted link, and the other end of it."""
    link = MqttLink(broker.config(), None, "5", None)

    def accept(*_: object) -> None:
        link.is_accepted = True

    link.on_connect = accept
    link.open()
    peer = broker.welcome()
    while not link.is_accepted:
        link.move(wake.fileno(), DEADLINE_S)
    yield link, peer
    link.close()


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"\x30\xff\xff\xff\x7f", "a packet of 268435455 bytes; at most 50000"),
        (b"\x90\xff\xff\xff\x7f", "a packet of 268435455 bytes; at most 50000"),
        (b"\x34\x40", "QoS 2"),
        (b"\x36\x40", "QoS 2"),
        (b"\x20\x03", "a second answer"),
    ],
)
def test_a_packet_that_may_not_come_is_refused_by_its_header_before_there_is_room_for_it(
    linked: tuple[MqttLink, Peer], wake: socket.socket, header: bytes, told: str
) -> None:
    link, peer = linked
    peer.send(header)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match=told):
            link.move(wake.fileno(), DEADLINE_S)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_largest_packet_that_is_read_is_announced(broker: ScriptedBroker) -> None:
    link = MqttLink(broker.config(), None, "5", None)
    link.open()
    assert b"\x27" + (50_000).to_bytes(4, "big") in broker.accept().expect(CONNECT)
    link.close()


def test_a_packet_at_the_bound_is_read_in_whatever_pieces_it_comes(
    linked: tuple[MqttLink, Peer], wake: socket.socket
) -> None:
    link, peer = linked
    found: list[bytes] = []
    link.on_message = lambda _link, _data, came: found.append(bytes(came.payload))
    payload = bytes(50_000 - len(text("t")) - 3)
    whole = message("5", "t", payload, 7)
    for piece in (whole[:1], whole[1:2], whole[2:5], whole[5:20_000], whole[20_000:]):
        peer.send(piece)
        link.move(wake.fileno(), 0.05)
    while not found:
        link.move(wake.fileno(), DEADLINE_S)
    assert found == [payload]
    assert peer.expect(PUBACK) == b"\x00\x07"


def test_a_broker_that_reads_no_acknowledgement_does_not_fill_the_memory(
    linked: tuple[MqttLink, Peer], wake: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, peer = linked
    for _ in range(200):  # more than the buffers of both sockets hold
        link.publish("t", bytes(50_000))
    monkeypatch.setattr(mqtt_link, "MAX_UNSENT", len(link._out_packet) + 50)
    peer.send(*(message("5", "t", b"x", number) for number in range(1, 100)))
    with pytest.raises(ConnectionError, match="does not read"):
        move_on(link, wake)


def move_on(link: MqttLink, wake: socket.socket) -> None:
    """Move a link until it ends."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        link.move(wake.fileno(), 0.1)


def test_a_descriptor_that_can_be_read_ends_a_wait_which_says_so(
    linked: tuple[MqttLink, Peer], wake: socket.socket
) -> None:
    link, peer = linked
    assert not link.move(wake.fileno(), 0.0)
    peer.send(PONG)
    assert not link.move(wake.fileno(), DEADLINE_S)
    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        assert link.move(near.fileno(), DEADLINE_S)


@pytest.mark.parametrize("told", [0, 7, None])
def test_a_silent_link_is_pinged_after_our_own_keepalive_at_the_latest(
    broker: ScriptedBroker, wake: socket.socket, told: int | None
) -> None:
    link = MqttLink(replace(broker.config(), keepalive_s=1), None, "5", None)
    link.open()
    peer = broker.accept()
    peer.expect(CONNECT)
    peer.send(connack())
    link.on_connect = lambda *_: link.accept_keepalive(told)
    with pytest.raises(ConnectionError, match="a ping was not answered"):
        move_on(link, wake)
    assert peer.expect(PINGREQ) == b""


def test_a_handshake_that_nobody_answers_ends(broker: ScriptedBroker) -> None:
    context = ssl.create_default_context()
    expect_role(context, ServerRole.BROKER)
    link = MqttLink(replace(broker.config(), connect_timeout_s=0.1), context, "5", None)
    with pytest.raises(TimeoutError):
        link.open()
    assert broker.accept().sock.recv(1) == b"\x16"  # a TLS handshake was begun
