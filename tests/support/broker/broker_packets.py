"""Broker packets, written by hand from the standard and independent of the code that reads them; and a scripted broker."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from fedcg.wire.transport.mqtt_config import MqttConfig, Protocol
from tests.support.broker.brokers import DEADLINE_S, HOST

CONNECT, PUBLISH, PUBACK, SUBSCRIBE, PINGREQ, DISCONNECT = 1, 3, 4, 8, 12, 14
KEEPALIVE_S = 30
PONG = b"\xd0\x00"


def varint(number: int) -> bytes:
    """MQTT 5.0, section 1.5.5."""
    low, high = number % 128, number // 128
    return bytes((low | 0x80,)) + varint(high) if high else bytes((low,))


def text(words: str) -> bytes:
    data = words.encode()
    return len(data).to_bytes(2, "big") + data


def packet(head: int, body: bytes) -> bytes:
    return bytes((head,)) + varint(len(body)) + body


def connack(protocol: str = "5", reason: int = 0, properties: bytes = b"") -> bytes:
    return packet(0x20, bytes((0, reason)) + (varint(len(properties)) + properties if protocol == "5" else b""))


def message(protocol: str, topic: str, payload: bytes, number: int = 0) -> bytes:
    """Return a PUBLISH at QoS 1 with a packet number, or at QoS 0 without."""
    body = text(topic) + (number.to_bytes(2, "big") if number else b"")
    body += b"\x00" if protocol == "5" else b""
    return packet(0x30 | (2 if number else 0), body + payload)


def suback(protocol: str, number: int, reasons: bytes) -> bytes:
    return packet(0x90, number.to_bytes(2, "big") + (b"\x00" if protocol == "5" else b"") + reasons)


def puback(number: int, rest: bytes = b"") -> bytes:
    return packet(0x40, number.to_bytes(2, "big") + rest)


def hang_up(rest: bytes = b"") -> bytes:
    return packet(0xE0, rest)


class Peer:
    """One client's connection, from the broker's side; a test reads and answers packet by packet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(DEADLINE_S)
        self.sock = sock
        self._file = sock.makefile("rb")

    def next(self) -> tuple[int, bytes] | None:
        """Return kind and body of the client's next packet; None if the client disconnected."""
        try:
            head = self._file.read(1)
            length = shift = 0
            while head:
                byte = self._file.read(1)[0]
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    return head[0] >> 4, self._file.read(length)
        except ConnectionResetError:
            pass
        return None

    def expect(self, kind: int) -> bytes:
        """Return the body of the next packet, which must be of this kind."""
        found = self.next()
        assert found is not None, f"the client disconnected instead of sending a packet of kind {kind}"
        assert found[0] == kind, f"a packet of kind {found[0]} came, not {kind}: {found[1][:80]!r}"
        return found[1]

    def expect_message(self) -> tuple[int, bytes]:
        """Return packet id and payload of the next packet, a PUBLISH of MQTT 5 at QoS 1."""
        body = self.expect(PUBLISH)
        after = 2 + int.from_bytes(body[:2], "big")
        return int.from_bytes(body[after : after + 2], "big"), body[after + 3 :]

    def rest(self) -> list[int]:
        """Return the kinds of all further packets until the client disconnects."""
        kinds = []
        while (found := self.next()) is not None:
            kinds.append(found[0])
        return kinds

    def send(self, *packets: bytes) -> None:
        self.sock.sendall(b"".join(packets))

    def close(self) -> None:
        self._file.close()
        self.sock.close()


class ScriptedBroker:
    """Listens on loopback, in plain text; the test decides its answers."""

    def __init__(self, receive_bytes: int = 0) -> None:
        self._server = socket.socket()
        if receive_bytes:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._server.bind((HOST, 0))
        self._server.listen()
        self._server.settimeout(DEADLINE_S)
        self.port = int(self._server.getsockname()[1])
        self._peers: list[Peer] = []

    def config(self, protocol: Protocol = "5") -> MqttConfig:
        """The configuration for client `a`."""
        return MqttConfig(
            HOST, self.port, "a", insecure=True, protocol=protocol, keepalive_s=KEEPALIVE_S, max_inbound=50_000
        )

    def accept(self) -> Peer:
        """Return the next connection, before its CONNECT is read."""
        self._peers.append(Peer(self._server.accept()[0]))
        return self._peers[-1]

    def welcome(self, protocol: str = "5", properties: bytes = b"") -> Peer:
        """Return the next connection, with its CONNECT read and granted."""
        peer = self.accept()
        peer.expect(CONNECT)
        peer.send(connack(protocol, 0, properties))
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._server.close()


@contextlib.contextmanager
def scripted_broker(receive_bytes: int = 0) -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker(receive_bytes)
    try:
        yield broker
    finally:
        broker.close()


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker(receive_bytes=16_384) as made:
        yield made
