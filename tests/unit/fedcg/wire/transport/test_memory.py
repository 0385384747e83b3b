"""The filters of the broker in one process, on which the fakes of other tests rest; its laws are in the contract suite."""

import pytest

from tests.support.broker.memory import topic_matches


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
