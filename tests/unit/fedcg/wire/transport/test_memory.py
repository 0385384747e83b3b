from __future__ import annotations

import pytest

from fedcg.wire.transport.memory import MemoryBroker, MemoryTransport, topic_matches
from tests.support.broker.brokers import Client
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("topic_filter", "topic", "matches"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
        ("a/+/c", "a/b/c", True),
        ("a/+", "a/b/c", False),
        ("a/+", "a", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("#", "a/b", True),
        ("a/#", "b/a", False),
        ("+/b", "a/b", True),
    ],
)
def test_filters_match_as_mqtt_says(topic_filter: str, topic: str, matches: bool) -> None:
    assert topic_matches(topic_filter, topic) is matches


def test_a_recorder_sees_what_was_let_through_and_by_whom() -> None:
    seen: list[tuple[str, str, bytes]] = []
    broker = MemoryBroker(
        rules=lambda _identity, action, topic: action == "read" or topic != "no",
        record=lambda identity, topic, payload: seen.append((identity, topic, payload)),
    )
    client = Client(MemoryTransport(broker, "a")).start().await_link()
    client.transport.publish("no", b"1")
    client.transport.publish("yes", b"2")
    client.transport.close()
    assert seen == [("a", "yes", b"2")]


def test_a_second_client_of_the_same_name_throws_the_first_out() -> None:
    broker = MemoryBroker()
    first = Client(MemoryTransport(broker, "a")).start().await_link()
    second = Client(MemoryTransport(broker, "a")).start().await_link()
    wait_until(lambda: first.links == [True, False], "the first is told")
    second.transport.publish("t", b"1")
    for client in (first, second):
        client.transport.close()


def test_a_topic_under_two_filters_is_delivered_once() -> None:
    broker = MemoryBroker()
    client = Client(MemoryTransport(broker, "a"))
    for topic_filter in ("t/#", "t/+", "t/x"):
        client.transport.subscribe(topic_filter)
    client.start().await_link()
    client.transport.publish("t/x", b"1")
    client.transport.publish("t/x", b"2")
    client.await_payload("t/x", b"2")
    client.transport.close()
    assert client.payloads("t/x") == [b"1", b"2"]
