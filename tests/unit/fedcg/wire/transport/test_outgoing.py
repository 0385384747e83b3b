import pytest

from fedcg.wire.errors import TransportError
from fedcg.wire.transport.mqtt_link import MAX_SENDS, Outgoing, OutgoingQueue


def message(payload: bytes, qos: int = 1) -> Outgoing:
    return Outgoing("t", payload, qos, retain=False)


def take(queue: OutgoingQueue, in_flight: int = 20) -> bytes | None:
    taken = queue.take(in_flight)
    return None if taken is None else taken.payload


def test_messages_leave_in_the_order_they_came() -> None:
    queue = OutgoingQueue(10, 1000)
    for payload in (b"1", b"2", b"3"):
        queue.put(message(payload, qos=0))
    assert [take(queue), take(queue), take(queue), take(queue)] == [b"1", b"2", b"3", None]


def test_the_queue_is_bounded_in_messages_and_counts_what_is_not_acknowledged() -> None:
    queue = OutgoingQueue(2, 1000)
    queue.put(first := message(b"1"))
    queue.put(message(b"2"))
    assert queue.take(20) is first
    with pytest.raises(TransportError, match="full"):
        queue.put(message(b"3"))
    queue.acknowledged(first)
    queue.put(message(b"3"))
    assert len(queue) == 2


def test_the_queue_is_bounded_in_bytes_and_gives_them_back() -> None:
    queue = OutgoingQueue(100, 10)
    queue.put(message(b"12345678", qos=0))
    with pytest.raises(TransportError, match="full"):
        queue.put(message(b"123"))
    queue.take(20)
    queue.put(again := message(b"1234567890"))
    queue.take(20)
    with pytest.raises(TransportError):
        queue.put(message(b"1"))
    queue.acknowledged(again)
    queue.put(message(b"1"))


def test_a_qos_1_message_waits_for_room_in_flight() -> None:
    queue = OutgoingQueue(10, 1000)
    for payload in (b"1", b"2"):
        queue.put(message(payload))
    first = queue.take(1)
    assert first is not None
    assert queue.take(1) is None
    queue.acknowledged(first)
    assert take(queue, 1) == b"2"


def test_after_a_lost_link_qos_1_is_sent_again_in_order_and_qos_0_is_gone() -> None:
    queue = OutgoingQueue(10, 1000)
    for payload, qos in ((b"1", 1), (b"2", 0), (b"3", 1), (b"4", 0), (b"5", 1)):
        queue.put(message(payload, qos))
    for _ in range(3):
        assert queue.take(20) is not None
    queue.link_lost()
    assert [take(queue), take(queue), take(queue), take(queue)] == [b"1", b"3", b"5", None]


def test_a_message_that_breaks_every_link_is_given_up() -> None:
    queue = OutgoingQueue(10, 1000)
    queue.put(message(b"poison"))
    for _ in range(MAX_SENDS):
        assert queue.take(20) is not None
        queue.link_lost()
    assert queue.take(20) is None
    assert len(queue) == 0


def test_the_time_without_an_acknowledgement_counts_from_the_last_one_while_some_are_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("fedcg.wire.transport.mqtt_link.time.monotonic", lambda: now[0])
    queue = OutgoingQueue(10, 1000)
    for name in ("a", "b"):
        queue.put(Outgoing(name, b"x", 1, retain=False))
    assert queue.owed_s() == 0.0  # nothing was sent
    first, second = queue.take(2), queue.take(2)
    assert first is not None
    assert second is not None
    now[0] = 130.0
    assert queue.owed_s() == 30.0
    queue.acknowledged(first)
    now[0] = 140.0
    assert queue.owed_s() == 10.0
    queue.acknowledged(second)
    assert queue.owed_s() == 0.0
