"""Packets of MQTT 5 and 3.1.1: written as paho writes them, or as the standard has them; read from any broker, friend or foe."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fedcg.wire import mqtt_packets
from fedcg.wire.errors import MalformedError, TooLargeError
from fedcg.wire.mqtt_packets import (
    Acknowledged,
    Connected,
    Ended,
    Message,
    Packet,
    PacketReader,
    Pong,
    Subscribed,
    explain,
)
from fedcg.wire.transport import Will
from tests.broker_packets import PONG, connack, hang_up, message, packet, puback, scripted_broker, suback, text

Version = Literal["5", "3.1.1"]
VERSIONS: tuple[Version, ...] = ("5", "3.1.1")
BOUND = 4096
EACH_VERSION = pytest.mark.parametrize("protocol", VERSIONS)

# Every property of MQTT 5.0, section 2.2.2.2, with a value.
PROPERTIES = {
    0x01: b"\x01",
    0x02: b"\x00\x00\x00\x09",
    0x03: text("text/plain"),
    0x08: text("answers"),
    0x09: b"\x00\x02\xff\xfe",
    0x0B: b"\xff\x7f",
    0x11: b"\x00\x00\x00\x00",
    0x12: text("a"),
    0x13: b"\x00\x3c",
    0x15: text("SCRAM"),
    0x16: b"\x00\x01\x00",
    0x17: b"\x01",
    0x18: b"\x00\x00\x00\x01",
    0x19: b"\x01",
    0x1A: text("some"),
    0x1C: text("elsewhere"),
    0x1F: text("Grüß Gott"),
    0x21: b"\x00\x10",
    0x22: b"\x00\x0a",
    0x23: b"\x00\x01",
    0x24: b"\x01",
    0x25: b"\x01",
    0x26: text("key") + text("value"),
    0x27: b"\x00\x01\x86\xa0",
    0x28: b"\x01",
    0x29: b"\x01",
    0x2A: b"\x01",
}
LENGTHS = {
    127: "7f",
    128: "8001",
    16_383: "ff7f",
    16_384: "808001",
    2_097_151: "ffff7f",
    2_097_152: "80808001",
}  # MQTT 5.0, section 1.5.5, and 3.1.1, section 2.2.3


def property_of(name: int) -> bytes:
    return bytes((name,)) + PROPERTIES[name]


def read(reader: PacketReader, data: bytes, pieces: Iterable[int] = ()) -> list[Packet]:
    """Read as a link does: into the room there is, at most so many bytes at once."""
    found: list[Packet] = []
    sizes = iter(pieces)
    while data:
        room = reader.room
        assert len(room) > 0
        count = min(len(room), len(data), next(sizes, len(data)))
        room[:count] = data[:count]
        data = data[count:]
        if reader.add(count):
            found += reader.packets()
    return found


def parse(protocol: str, data: bytes) -> Packet:
    (found,) = read(PacketReader(protocol, BOUND), data)
    return found


def of_paho(protocol: Version, act: Callable[[paho.Client], object], will: Will | None = None) -> tuple[bytes, bytes]:
    """The CONNECT that paho writes, and what it writes after that when told to act."""
    is_5 = protocol == "5"
    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        "device-ä",
        clean_session=None if is_5 else True,
        protocol=MQTTProtocolVersion.MQTTv5 if is_5 else MQTTProtocolVersion.MQTTv311,
        manual_ack=True,
    )
    if will is not None:
        client.will_set(will.topic, will.payload, qos=1, retain=will.retain)
    properties = Properties(PacketTypes.CONNECT) if is_5 else None  # type: ignore[no-untyped-call]
    if properties is not None:
        properties.MaximumPacketSize = 70_000
    with scripted_broker() as broker:
        client.connect("127.0.0.1", broker.port, keepalive=300, properties=properties)
        peer = broker.accept()
        first = peer.sock.recv(65_536)
        act(client)
        sock = client.socket()
        if sock is not None:  # it hangs up by itself after a DISCONNECT
            sock.close()
        rest = b"".join(iter(lambda: peer.sock.recv(65_536), b""))
    return first, rest


@EACH_VERSION
@pytest.mark.parametrize(
    "will", [None, Will("devices/ä/status", b"gone"), Will("s", b"\x00\xff" * 100, retain=False), Will("s", b"")]
)
def test_connect_is_what_paho_writes(protocol: Version, will: Will | None) -> None:
    expected, _ = of_paho(protocol, lambda _: None, will)
    assert mqtt_packets.connect(protocol, "device-ä", 300, 70_000, will) == expected


def test_connect_is_what_the_standards_say() -> None:
    """Section 3.1 of both: name, level 5 or 4, flags (clean, will at QoS 1, retained), keepalive, then the payload."""
    will = Will("w", b"!")
    assert mqtt_packets.connect("5", "c", 10, 1 << 20, will) == bytes.fromhex(
        "101a 00044d515454 05 2e 000a 05 2700100000 000163 00 000177 000121"
    )
    assert mqtt_packets.connect("3.1.1", "c", 10, 1 << 20, will) == bytes.fromhex(
        "1013 00044d515454 04 2e 000a 000163 000177 000121"
    )


@EACH_VERSION
def test_subscribe_is_what_paho_writes(protocol: Version) -> None:
    filters = [("a/+/c", 1), ("ü/#", 0)]
    _, expected = of_paho(protocol, lambda client: client.subscribe(filters))
    assert mqtt_packets.subscribe(protocol, 1, filters) == expected


@EACH_VERSION
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(("qos", "number"), [(0, 0), (1, 1)])
def test_publish_is_what_paho_writes(protocol: Version, qos: int, number: int, retain: bool) -> None:
    payload = b"\x00payload\xff" * 30
    _, expected = of_paho(protocol, lambda client: client.publish("a/ö", payload, qos, retain))
    assert mqtt_packets.publish(protocol, "a/ö", payload, number, retain=retain) == expected


@EACH_VERSION
def test_acknowledge_and_disconnect_are_what_paho_writes(protocol: Version) -> None:
    _, expected = of_paho(protocol, lambda client: (client.ack(0x1234, 1), client.disconnect()))
    assert mqtt_packets.acknowledge(0x1234) + mqtt_packets.disconnect() == expected


def test_ping_is_what_the_standards_say() -> None:
    assert mqtt_packets.ping() == b"\xc0\x00"  # section 3.12 of both


@EACH_VERSION
@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_is_written_and_read_in_as_few_bytes_as_it_needs(protocol: Version, length: int) -> None:
    payload = bytes(length - len(text("t")) - (1 if protocol == "5" else 0))
    written = mqtt_packets.publish(protocol, "t", payload, 0, retain=False)
    size = bytes.fromhex(LENGTHS[length])
    assert written[: 1 + len(size)] == b"\x30" + size
    assert len(written) == 1 + len(size) + length
    assert read(PacketReader(protocol, len(written)), written) == [Message("t", payload, retained=False, packet=0)]
    with pytest.raises(TooLargeError):
        read(PacketReader(protocol, len(written) - 1), written)


topics = st.text(min_size=1, max_size=20)
numbers = st.integers(1, 0xFFFF)
properties = st.lists(st.sampled_from(sorted(PROPERTIES)), unique=True, max_size=4).map(
    lambda names: b"".join(property_of(name) for name in names)
)
rests = st.sampled_from([b"", b"\x00", b"\x87", b"\x80\x00", b"\x97\x04\x1f\x00\x01x"])


@st.composite
def a_packet(draw: st.DrawFn, protocol: str) -> tuple[bytes, Packet]:
    """A packet that a broker may send, and what it says."""
    is_5 = protocol == "5"
    kind = draw(st.sampled_from(("message", "connack", "suback", "puback", "pong") + (("ended",) if is_5 else ())))
    number, reasons, rest = draw(numbers), draw(st.binary(min_size=1, max_size=5)), draw(rests) if is_5 else b""
    if kind == "message":
        topic, payload, retained = draw(topics), draw(st.binary(max_size=300)), draw(st.booleans())
        asked = draw(st.sampled_from((0, number)))
        data = message(protocol, topic, payload, asked, retained=retained, properties=draw(properties) if is_5 else b"")
        return data, Message(topic, payload, retained, asked)
    reason = rest[0] if rest else 0
    others: dict[str, tuple[bytes, Packet]] = {
        "connack": (connack(protocol, 0x87 if is_5 else 5), Connected(0x87)),
        "suback": (suback(protocol, number, reasons), Subscribed(number, reasons)),
        "puback": (puback(number, rest), Acknowledged(number, reason)),
        "pong": (PONG, Pong()),
        "ended": (hang_up(rest), Ended(reason)),
    }
    return others[kind]


protocols = st.sampled_from(VERSIONS)
streams = protocols.flatmap(lambda protocol: st.tuples(st.just(protocol), st.lists(a_packet(protocol), max_size=6)))


@settings(max_examples=60)
@given(streams, st.lists(st.integers(1, 400), max_size=40))
def test_packets_are_the_same_in_whatever_pieces_they_come(
    stream: tuple[Version, list[tuple[bytes, Packet]]], pieces: list[int]
) -> None:
    protocol, sent = stream
    data = b"".join(written for written, _ in sent)
    assert read(PacketReader(protocol, BOUND), data, pieces) == [meant for _, meant in sent]


@given(protocols, st.binary(max_size=600), st.lists(st.integers(1, 50), max_size=20))
def test_garbage_is_malformed_and_nothing_worse(protocol: Version, garbage: bytes, pieces: list[int]) -> None:
    only_malformed(protocol, garbage, pieces)


@given(streams, st.data())
def test_an_altered_stream_is_malformed_at_worst(
    stream: tuple[Version, list[tuple[bytes, Packet]]], data: st.DataObject
) -> None:
    protocol, sent = stream
    altered = bytearray(b"".join(written for written, _ in sent) or b"\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    only_malformed(protocol, bytes(altered), ())


@given(protocols.flatmap(lambda protocol: st.tuples(st.just(protocol), a_packet(protocol))))
def test_a_packet_that_was_cut_short_is_waited_for_or_malformed(case: tuple[Version, tuple[bytes, Packet]]) -> None:
    protocol, (whole, _) = case
    body_at = 1 + next(index for index, byte in enumerate(whole[1:], 1) if byte < 0x80)
    for size in range(len(whole)):
        assert read(PacketReader(protocol, BOUND), whole[:size]) == []
    for size in range(len(whole) - body_at):  # with a length that says so
        found = only_malformed(protocol, packet(whole[0], whole[body_at : body_at + size]), ())
        assert not found or size >= 2 or isinstance(found[0], Ended)  # all others have at least two bytes


def only_malformed(protocol: Version, data: bytes, pieces: Iterable[int]) -> list[Packet]:
    reader = PacketReader(protocol, BOUND)
    try:
        return read(reader, data, pieces)
    except MalformedError:
        return []
    finally:
        assert len(reader._buffer) <= BOUND + mqtt_packets._FIRST_ROOM


@EACH_VERSION
def test_a_size_over_the_bound_is_refused_before_any_room_is_made(protocol: Version) -> None:
    reader = PacketReader(protocol, 2 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=r"268435460 bytes; at most 2097152"):
            read(reader, b"\x30\xff\xff\xff\x7f")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_size_within_the_bound_makes_room_for_that_packet_and_little_more() -> None:
    reader = PacketReader("5", 2 << 20)
    assert read(reader, b"\x30\x80\x80\x40") == []  # 1 MiB
    assert 1 << 20 <= len(reader.room) <= (1 << 20) + (64 << 10)
    reader = PacketReader("5", 2 << 20)
    large = message("5", "t", bytes(1 << 20))
    for _ in range(10):
        assert len(read(reader, large + PONG)) == 2
    assert len(reader._buffer) <= len(large) + (64 << 10)


def test_a_length_of_more_than_four_bytes_is_refused() -> None:
    with pytest.raises(MalformedError, match="four bytes"):
        read(PacketReader("5", BOUND), b"\x30\xff\xff\xff\xff\x7f")
    with pytest.raises(MalformedError, match="four bytes"):
        parse("5", packet(0x20, b"\x00\x00\x80\x80\x80\x80\x00"))


def test_a_payload_stays_what_it_was_when_more_is_read() -> None:
    reader = PacketReader("5", BOUND)
    (first,) = read(reader, message("5", "t", b"first"))
    read(reader, message("5", "t", b"other"))
    assert first == Message("t", b"first", retained=False, packet=0)
    assert isinstance(first.payload, bytes)


@given(st.permutations(sorted(PROPERTIES)))
def test_of_all_properties_of_an_answer_the_three_that_count_are_taken(names: list[int]) -> None:
    told = b"".join(property_of(name) for name in names) + property_of(0x26)  # user properties may come again
    assert parse("5", connack("5", 0, told)) == Connected(0, max_packet=100_000, in_flight=16, keepalive_s=60)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_alone_is_read_over_and_cut_short_is_refused(name: int) -> None:
    found = parse("5", connack("5", 0, property_of(name)))
    assert found == Connected(
        0,
        max_packet=100_000 if name == 0x27 else None,
        in_flight=16 if name == 0x21 else None,
        keepalive_s=60 if name == 0x13 else None,
    )
    with pytest.raises(MalformedError):
        parse("5", connack("5", 0, property_of(name)[:-1]))


@pytest.mark.parametrize(
    "told",
    [
        b"\x7e\x00",  # unknown
        b"\x00",
        property_of(0x21) * 2,  # repeated
        b"\x21\x00\x00",  # no message at all, section 3.2.2.3.3
        b"\x27\x00\x00\x00\x00",  # no packet at all, section 3.2.2.3.6
    ],
)
def test_properties_that_the_standard_forbids_are_refused(told: bytes) -> None:
    with pytest.raises(MalformedError):
        parse("5", connack("5", 0, told))


def test_properties_of_another_length_than_they_say_are_refused() -> None:
    for odd in (
        packet(0x20, b"\x00\x00\x09\x13\x00\x3c"),
        packet(0x20, b"\x00\x00\x02\x13\x00\x3c"),  # one that goes on behind them
        message("5", "t", b"")[:-1] + b"\x05",
    ):
        with pytest.raises(MalformedError):
            parse("5", odd)


@pytest.mark.parametrize("protocol", VERSIONS)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "unsupported protocol version"),
        (2, "client identifier not valid"),
        (3, "server unavailable"),
        (4, "bad user name or password"),
        (5, "not authorized"),
    ],
)
def test_a_refusal_in_the_form_of_3_1_1_is_understood_whatever_was_asked_for(
    protocol: Version, code: int, words: str
) -> None:
    answer = parse(protocol, connack("3.1.1", code))  # section 3.2.2.3 of 3.1.1
    assert isinstance(answer, Connected)
    assert explain(answer.reason) == words


def test_a_reason_without_a_name_is_told_as_its_number() -> None:
    assert explain(0xB7) == "reason 0xb7"


@EACH_VERSION
@pytest.mark.parametrize(
    ("name", "head", "body"),
    [
        ("QoS 2", 0x34, text("t") + b"\x00\x01\x00"),
        ("QoS 3", 0x36, text("t") + b"\x00\x01\x00"),
        ("packet id 0", 0x32, text("t") + b"\x00\x00\x00"),
        ("no topic", 0x30, text("") + b"\x00"),
        ("no UTF-8", 0x30, b"\x00\x02\xc3\x28\x00"),
        ("a surrogate", 0x30, b"\x00\x03\xed\xa0\x80\x00"),
        ("a topic that is longer than its packet", 0x30, b"\x00\x09t\x00"),
        ("reserved flags", 0x42, b"\x00\x01"),
        ("reserved flags", 0xD1, b""),
        ("an empty CONNACK", 0x20, b""),
        ("an empty SUBACK", 0x90, b""),
        *[(f"kind {kind}", kind << 4, b"\x00\x01\x00") for kind in (0, 1, 5, 6, 7, 8, 10, 11, 12, 15)],
    ],
)
def test_what_a_broker_may_not_send_is_refused(protocol: Version, name: str, head: int, body: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(protocol, packet(head, body))


def test_a_broker_hangs_up_in_words_only_in_mqtt_5() -> None:
    assert parse("5", hang_up(b"\x8b\x00")) == Ended(0x8B)
    with pytest.raises(MalformedError, match="kind 14"):
        parse("3.1.1", hang_up())
