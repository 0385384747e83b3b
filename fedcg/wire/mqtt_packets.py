"""Packets of MQTT 5 and 3.1.1 as a client writes and reads them: bytes in, bytes out, no I/O.

What `mqtt` needs and no more: QoS 0 and 1, wills, retained messages. A broker is not trusted: a packet's announced length is
held against a bound before anything is allocated for it, and whatever the standard does not allow a broker to send here is
refused. Sources: MQTT 5.0 and 3.1.1 (OASIS), sections 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedcg.wire.errors import MalformedError, TooLargeError
from fedcg.wire.transport import Will

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK, PINGREQ, PINGRESP, DISCONNECT = 1, 2, 3, 4, 8, 9, 12, 13, 14
FAILURE = 0x80  # reasons from here on are failures
_LEVELS = {"5": 5, "3.1.1": 4}
_HEAD_BYTES = 2  # of the shortest packet
_FIRST_ROOM = 32 * 1024
_MORE_ROOM = 16 * 1024  # behind a large packet, so that the start of the next one comes with its end
_RECEIVE_MAXIMUM, _MAXIMUM_PACKET, _SERVER_KEEPALIVE = 0x21, 0x27, 0x13
_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")

# How long each property of MQTT 5 is (section 2.2.2.2): fixed, "varint", "text" (a length, then bytes), "pair" (two of them).
_PROPERTIES: dict[int, int | str] = {
    **dict.fromkeys((0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A), 1),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), 2),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), 4),
    **dict.fromkeys((0x03, 0x08, 0x09, 0x12, 0x15, 0x16, 0x1A, 0x1C, 0x1F), "text"),
    0x0B: "varint",
    0x26: "pair",
}
_REASONS = {
    0x00: "normal disconnection",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x84: "unsupported protocol version",
    0x85: "client identifier not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8D: "keepalive timeout",
    0x8E: "session taken over",
    0x8F: "topic filter invalid",
    0x90: "topic name invalid",
    0x93: "receive maximum exceeded",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format invalid",
    0x9A: "retain not supported",
    0x9B: "QoS not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9F: "connection rate exceeded",
    0xA0: "maximum connect time",
    0xA2: "wildcard subscriptions not supported",
}
_OLD_REFUSALS = {1: 0x84, 2: 0x85, 3: 0x88, 4: 0x86, 5: 0x87}  # return codes of 3.1.1 as reasons of 5


def explain(reason: int) -> str:
    """A reason code in words."""
    return _REASONS.get(reason, f"reason {reason:#04x}")


@dataclass(frozen=True)
class Connected:
    """The answer to CONNECT; None for what the broker does not say.

    Attributes:
        reason: 0, or why not.
        max_packet: largest packet in bytes that the broker takes.
        in_flight: QoS 1 publishes that it takes before it acknowledges.
        keepalive_s: what it wants instead of ours.
    """

    reason: int
    max_packet: int | None = None
    in_flight: int | None = None
    keepalive_s: int | None = None


@dataclass(frozen=True)
class Subscribed:
    """The answer to SUBSCRIBE: a byte with the reason for each filter, below `FAILURE` when it was granted."""

    packet: int
    reasons: bytes


@dataclass(frozen=True)
class Message:
    """A PUBLISH of the broker; `packet` is what to acknowledge, 0 at QoS 0."""

    topic: str
    payload: bytes
    retained: bool
    packet: int


@dataclass(frozen=True)
class Acknowledged:
    """The broker has a QoS 1 publish, or refuses it."""

    packet: int
    reason: int


@dataclass(frozen=True)
class Pong:
    """The answer to a ping."""


@dataclass(frozen=True)
class Ended:
    """The broker hangs up (MQTT 5)."""

    reason: int


Packet = Connected | Subscribed | Message | Acknowledged | Pong | Ended


def connect(protocol: str, identity: str, keepalive_s: int, max_packet: int, will: Will | None = None) -> bytes:
    """CONNECT with a clean session; `max_packet` is the largest packet in bytes that MQTT 5 lets the broker send."""
    is_5 = protocol == "5"
    flags = 0x02 if will is None else 0x02 | 0x04 | 0x08 | (0x20 if will.retain else 0)
    parts = [_text("MQTT"), bytes((_LEVELS[protocol], flags)), _U16.pack(keepalive_s)]
    if is_5:
        parts.append(b"\x05" + bytes((_MAXIMUM_PACKET,)) + _U32.pack(max_packet))
    parts.append(_text(identity))
    if will is not None:
        parts += [b"\x00" if is_5 else b"", _text(will.topic), _U16.pack(len(will.payload)), will.payload]
    return _packet(CONNECT << 4, *parts)


def subscribe(protocol: str, packet: int, filters: Sequence[tuple[str, int]]) -> bytes:
    """SUBSCRIBE to filters with their QoS."""
    asked = (_text(topic) + bytes((qos,)) for topic, qos in filters)
    return _packet(SUBSCRIBE << 4 | 2, _U16.pack(packet), b"\x00" if protocol == "5" else b"", *asked)


def publish(protocol: str, topic: str, payload: bytes, packet: int, *, retain: bool) -> bytes:
    """PUBLISH at QoS 1 under a packet id, or at QoS 0 with the id 0."""
    return _packet(
        PUBLISH << 4 | (2 if packet else 0) | retain,
        _text(topic),
        _U16.pack(packet) if packet else b"",
        b"\x00" if protocol == "5" else b"",
        payload,
    )


def acknowledge(packet: int) -> bytes:
    """PUBACK of a QoS 1 publish."""
    return bytes((PUBACK << 4, 2)) + _U16.pack(packet)


def ping() -> bytes:
    """PINGREQ."""
    return bytes((PINGREQ << 4, 0))


def disconnect() -> bytes:
    """DISCONNECT: the broker forgets the will."""
    return bytes((DISCONNECT << 4, 0))


class PacketReader:
    """Takes a stream of bytes apart: read into `room`, `add`, then iterate over `packets`.

    Args:
        protocol: what was agreed on.
        max_packet: the bound in bytes on one packet; room for more is never made.
    """

    def __init__(self, protocol: str, max_packet: int) -> None:
        self._is_5 = protocol == "5"
        self._max_packet = max_packet
        self._buffer = bytearray(_FIRST_ROOM)
        self._view = memoryview(self._buffer)
        self._held = 0
        self._wanted = _HEAD_BYTES  # before there is a packet to look at

    @property
    def room(self) -> memoryview:
        """Where the next bytes go; never empty after `packets` was used up."""
        return self._view[self._held :]

    def add(self, count: int) -> bool:
        """Take note that so many bytes were read into the room; whether `packets` has something now, and must be called."""
        self._held += count
        return self._held >= self._wanted

    def packets(self) -> Iterator[Packet]:
        """The packets that are whole.

        Raises:
            TooLargeError: a packet is announced that is over the bound.
            MalformedError: what a broker may not send to this client.
        """
        begin, self._wanted = 0, _HEAD_BYTES
        while (span := self._span(begin)) is not None:
            body, end = span
            if end > self._held:
                self._wanted = end - begin
                self._make_room(self._wanted)
                break
            yield self._parse(self._buffer[begin], _Body(self._view, body, end))
            begin = end
        if begin:
            rest = self._held - begin
            self._view[:rest] = self._view[begin : self._held]
            self._held = rest

    def _span(self, begin: int) -> tuple[int, int] | None:
        """Where the body of the packet at `begin` starts and ends; None while its length is not known."""
        length = 0
        for place in range(4):
            index = begin + 1 + place
            if index >= self._held:
                return None
            byte = self._buffer[index]
            length |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                end = index + 1 + length
                if end - begin > self._max_packet:
                    raise TooLargeError(
                        f"the broker sent a packet of {end - begin} bytes; at most {self._max_packet} are taken"
                    )
                return index + 1, end
        raise MalformedError("the broker sent a length of more than four bytes")

    def _make_room(self, size: int) -> None:
        """Grow for a packet whose length was checked; packets are moved to the front before more is read."""
        if size > len(self._buffer):
            grown = bytearray(size + _MORE_ROOM)
            grown[: self._held] = self._view[: self._held]
            self._buffer, self._view = grown, memoryview(grown)

    def _parse(self, head: int, body: _Body) -> Packet:
        kind, flags = head >> 4, head & 0x0F
        if kind == PUBLISH:
            return self._message(flags, body)
        parse = self._others.get(kind)
        if parse is None or flags or (kind == DISCONNECT and not self._is_5):
            raise MalformedError(f"the broker sent a packet of kind {kind} with flags {flags}")
        return parse(self, body)

    def _message(self, flags: int, body: _Body) -> Message:
        qos = flags >> 1 & 3
        if qos > 1:
            raise MalformedError(f"the broker sent a message at QoS {qos}, which was not asked for")
        topic = body.text()
        packet = body.u16() if qos else 0
        if not topic or (qos and not packet):
            raise MalformedError("the broker sent a message without a topic or a packet id")
        if self._is_5:
            body.skip_properties()
        return Message(topic, body.rest(), bool(flags & 1), packet)

    def _connected(self, body: _Body) -> Connected:
        body.u8()  # whether a session was kept; ours are clean
        reason = body.u8()
        told = body.properties() if self._is_5 and body.left else {}  # who only speaks 3.1.1 refuses 5 without any
        if told.get(_RECEIVE_MAXIMUM) == 0 or told.get(_MAXIMUM_PACKET) == 0:
            raise MalformedError("the broker grants no message at all")
        return Connected(
            _OLD_REFUSALS.get(reason, reason),
            told.get(_MAXIMUM_PACKET),
            told.get(_RECEIVE_MAXIMUM),
            told.get(_SERVER_KEEPALIVE),
        )

    def _subscribed(self, body: _Body) -> Subscribed:
        packet = body.u16()
        if self._is_5:
            body.skip_properties()
        return Subscribed(packet, body.rest())

    def _acknowledged(self, body: _Body) -> Acknowledged:
        packet = body.u16()
        return Acknowledged(packet, body.u8() if body.left else 0)

    def _pong(self, _body: _Body) -> Pong:
        return Pong()

    def _ended(self, body: _Body) -> Ended:
        return Ended(body.u8() if body.left else 0)

    _others: ClassVar[dict[int, Callable[[PacketReader, _Body], Packet]]] = {
        CONNACK: _connected,
        SUBACK: _subscribed,
        PUBACK: _acknowledged,
        PINGRESP: _pong,
        DISCONNECT: _ended,
    }


class _Body:
    """Reads one packet's body from the front to its end, and not a byte further."""

    def __init__(self, view: memoryview, begin: int, end: int) -> None:
        self._view = view
        self._at = begin
        self._end = end

    @property
    def left(self) -> int:
        return self._end - self._at

    def u8(self) -> int:
        return self._view[self._step(1)]

    def u16(self) -> int:
        return int(_U16.unpack_from(self._view, self._step(2))[0])

    def text(self) -> str:
        length = self.u16()
        begin = self._step(length)
        try:
            return str(self._view[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedError("the broker sent a text that is not UTF-8") from error

    def rest(self) -> bytes:
        begin = self._step(self.left)
        return bytes(self._view[begin : self._end])

    def skip_properties(self) -> None:
        self._step(self._varint())

    def properties(self) -> dict[int, int]:
        """The numbers among the properties, by identifier."""
        end = self._varint() + self._at
        found: dict[int, int] = {}
        while self._at < end:
            name = self._varint()
            kind = _PROPERTIES.get(name)
            if kind is None or name in found:
                raise MalformedError(f"the broker sent an unknown or repeated property {name:#x}")
            if isinstance(kind, int):
                begin = self._step(kind)
                found[name] = int.from_bytes(self._view[begin : begin + kind], "big")
            elif kind == "varint":
                found[name] = self._varint()
            else:
                for _ in range(2 if kind == "pair" else 1):
                    self._step(self.u16())
        if self._at > end:
            raise MalformedError("the broker sent properties that are longer than their length says")
        return found

    def _varint(self) -> int:
        value = 0
        for place in range(4):
            byte = self.u8()
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value
        raise MalformedError("the broker sent a length of more than four bytes")

    def _step(self, size: int) -> int:
        begin = self._at
        self._at += size
        if self._at > self._end:
            raise MalformedError("the broker sent a packet that is shorter than what it should hold")
        return begin


def _text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def _packet(head: int, *parts: bytes) -> bytes:
    length = sum(map(len, parts))
    size = bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return b"".join((bytes((head,)), size, *parts))
