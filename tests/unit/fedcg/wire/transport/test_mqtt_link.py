"""A link against a broker that does what the test says, in plain text on loopback; its queue, and what a configuration allows."""

import random
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedcg.wire.errors import MalformedError, TransportError
from fedcg.wire.tls import ServerRole, expect_role
from fedcg.wire.transport import mqtt_link
from fedcg.wire.transport.mqtt import BACKOFF_CAP_S, MqttTransport, backoff_s, probe
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.wire.transport.mqtt_link import MAX_SENDS, MqttLink, Outgoing, OutgoingQueue
from tests.support.broker import broker_packets as packets
from tests.support.broker.broker_packets import Peer, ScriptedBroker
from tests.support.broker.broker_packets import broker as broker
from tests.support.broker.brokers import DEADLINE_S, HOST, Pki
from tests.support.waiting import free_port


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
        (b"\x34\x40", "QoS 2"),
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
    assert b"\x27" + (50_000).to_bytes(4, "big") in broker.accept().expect(packets.CONNECT)
    link.close()


def test_a_packet_at_the_bound_is_read_in_any_pieces(linked: tuple[MqttLink, Peer], wake: socket.socket) -> None:
    link, peer = linked
    found: list[bytes] = []
    link.on_message = lambda _link, _data, came: found.append(bytes(came.payload))
    payload = bytes(50_000 - len(packets.text("t")) - 3)
    whole = packets.message("5", "t", payload, 7)
    for piece in (whole[:1], whole[1:2], whole[2:5], whole[5:20_000], whole[20_000:]):
        peer.send(piece)
        link.move(wake.fileno(), 0.05)
    while not found:
        link.move(wake.fileno(), DEADLINE_S)
    assert found == [payload]
    assert peer.expect(packets.PUBACK) == b"\x00\x07"


def test_a_broker_that_reads_no_acknowledgement_does_not_fill_the_memory(
    linked: tuple[MqttLink, Peer], wake: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, peer = linked
    for _ in range(200):  # more than the buffers of both sockets hold
        link.publish("t", bytes(50_000))
    monkeypatch.setattr(mqtt_link, "MAX_UNSENT", len(link._out_packet) + 50)
    peer.send(*(packets.message("5", "t", b"x", number) for number in range(1, 100)))
    with pytest.raises(ConnectionError, match="does not read"):
        move_on(link, wake)


def move_on(link: MqttLink, wake: socket.socket) -> None:
    """Move a link until it ends."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        link.move(wake.fileno(), 0.1)


def test_a_handshake_that_nobody_answers_ends(broker: ScriptedBroker) -> None:
    context = ssl.create_default_context()
    expect_role(context, ServerRole.BROKER)
    link = MqttLink(replace(broker.config(), connect_timeout_s=0.1), context, "5", None)
    with pytest.raises(TimeoutError):
        link.open()
    assert broker.accept().sock.recv(1) == b"\x16"  # a TLS handshake was begun


def outgoing(payload: bytes, qos: int = 1) -> Outgoing:
    return Outgoing("t", payload, qos, retain=False)


def queued(*messages: Outgoing) -> OutgoingQueue:
    queue = OutgoingQueue(10, 1000)
    for one in messages:
        queue.put(one)
    return queue


def take(queue: OutgoingQueue, in_flight: int = 20) -> bytes | None:
    taken = queue.take(in_flight)
    return None if taken is None else taken.payload


def test_the_queue_is_bounded_in_messages_and_counts_what_is_not_acknowledged() -> None:
    queue = OutgoingQueue(2, 1000)
    queue.put(first := outgoing(b"1"))
    queue.put(outgoing(b"2"))
    assert queue.take(20) is first
    with pytest.raises(TransportError, match="full"):
        queue.put(outgoing(b"3"))
    queue.acknowledged(first)
    queue.put(outgoing(b"3"))
    assert len(queue) == 2


def test_the_queue_is_bounded_in_bytes_and_gives_them_back() -> None:
    queue = OutgoingQueue(100, 10)
    queue.put(outgoing(b"12345678", qos=0))
    with pytest.raises(TransportError, match="full"):
        queue.put(outgoing(b"123"))
    queue.take(20)
    queue.put(again := outgoing(b"1234567890"))
    queue.take(20)
    with pytest.raises(TransportError):
        queue.put(outgoing(b"1"))
    queue.acknowledged(again)
    queue.put(outgoing(b"1"))


def test_a_qos_1_message_waits_for_room_in_flight() -> None:
    queue = queued(outgoing(b"1"), outgoing(b"2"))
    first = queue.take(1)
    assert first is not None
    assert queue.take(1) is None
    queue.acknowledged(first)
    assert take(queue, 1) == b"2"


def test_after_a_lost_link_qos_1_is_sent_again_in_order_and_qos_0_is_gone() -> None:
    queue = queued(*(outgoing(b"%d" % number, qos=number % 2) for number in (1, 2, 3, 4, 5)))
    assert [take(queue), take(queue), take(queue)] == [b"1", b"2", b"3"]
    queue.link_lost()
    assert [take(queue), take(queue), take(queue), take(queue)] == [b"1", b"3", b"5", None]


def test_a_message_that_breaks_every_link_is_given_up() -> None:
    queue = queued(outgoing(b"poison"))
    for _ in range(MAX_SENDS):
        assert queue.take(20) is not None
        queue.link_lost()
    assert queue.take(20) is None
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("host", "insecure", "has_tls", "why"),
    [
        *[(host, True, False, "loopback") for host in ("broker.example.org", "192.168.1.5", "0.0.0.0")],  # noqa: S104
        (HOST, False, False, "insecure"),
        (HOST, True, True, "contradicts"),
    ],
)
def test_plain_text_never_leaves_the_machine_and_must_be_asked_for(
    pki: Pki, host: str, insecure: bool, has_tls: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        MqttConfig(host, 1883, "a", tls=pki.tls("a") if has_tls else None, insecure=insecure)
    for here in (HOST, "127.0.0.2", "::1", "localhost"):
        assert MqttConfig(here, 1883, "a", insecure=True).tls is None


def test_the_tls_context_asks_for_1_3_and_checks_the_broker(pki: Pki) -> None:
    context = pki.tls("a").context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_missing_tls_file_is_named_at_start(pki: Pki, tmp_path: Path) -> None:
    files = TlsFiles(pki.ca, tmp_path / "gone.pem", pki.tls("a").key)
    transport = MqttTransport(MqttConfig(HOST, 1, "a", tls=files))
    with pytest.raises(TransportError, match=r"gone\.pem"):
        transport.start(print, print)
    transport.close()


def test_a_key_of_another_certificate_is_refused_at_start(pki: Pki) -> None:
    mixed = TlsFiles(pki.ca, pki.tls("a").cert, pki.tls("b").key)
    with pytest.raises(TransportError, match=r"a\.pem or .*b\.key is damaged, or the key is not the certificate's\."):
        mixed.context()


def test_nobody_listening_is_said_so(pki: Pki) -> None:
    with pytest.raises(TransportError, match="is the broker running"):
        probe(MqttConfig(HOST, free_port(), "a", tls=pki.tls("a"), protocol="5"), timeout_s=10)


def test_the_backoff_doubles_from_a_fifth_of_a_second_to_half_a_minute_with_jitter() -> None:
    rng = random.Random(0)
    for failures, ceiling in ((1, 0.2), (2, 0.4), (3, 0.8), (8, 25.6), (9, BACKOFF_CAP_S), (10_000, BACKOFF_CAP_S)):
        drawn = [backoff_s(failures, rng) for _ in range(200)]
        assert ceiling / 2 <= min(drawn) < max(drawn) <= ceiling
        assert max(drawn) - min(drawn) > ceiling / 4
