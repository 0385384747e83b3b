import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.messages import topics

TOPICS = topics.Topics("casting")
PREFIX = "fedcg/1/casting"
EVERY_TOPIC = [f"{PREFIX}/{kind}" for kind in ("offer", "coordinator", "keys", "aggregate")] + [
    f"{PREFIX}/devices/{device}/{kind}"
    for device in ("a", "b")
    for kind in ("up/control", "up/chunk", "status", "down/control", "down/chunk")
]
IDENTIFIERS = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)


def test_topics_are_spelled_as_the_protocol_says_in_at_most_the_seven_levels_of_aws() -> None:
    spelled = [TOPICS.offer, TOPICS.coordinator, TOPICS.keys, TOPICS.aggregate]
    for device in ("a", "b"):
        spelled += [TOPICS.up_control(device), TOPICS.up_chunk(device), TOPICS.status(device)]
        spelled += [TOPICS.down_control(device), TOPICS.down_chunk(device)]
    assert spelled == EVERY_TOPIC
    assert [TOPICS.parse(topic) for topic in spelled[:4]] == [
        topics.ParsedTopic(kind, None) for kind in topics.BROADCASTS
    ]
    assert max(topic.count("/") + 1 for topic in spelled) == 7


@given(IDENTIFIERS, IDENTIFIERS, st.sampled_from(topics.FROM_DEVICE + topics.TO_DEVICE))
def test_a_device_topic_parses_to_its_kind_and_device(federation: str, device: str, kind: topics.TopicKind) -> None:
    topic = f"fedcg/1/{federation}/devices/{device}/{kind.value}"
    assert topics.Topics(federation).parse(topic) == topics.ParsedTopic(kind, device)


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "fedcg/1/other/offer",
        "fedcg/2/casting/offer",
        f"{PREFIX}/offer/x",
        f"{PREFIX}/up/control",
        f"{PREFIX}/devices/a",
        f"{PREFIX}/devices/a/up",
        f"{PREFIX}/devices/a/up/control/x",
        f"{PREFIX}/devices/A/status",
        f"{PREFIX}/devices/+/status",
        f"{PREFIX}/devices/a/offer",
        f"{PREFIX}/#",
        f"{PREFIX}/devices//status",
    ],
)
def test_anything_else_is_not_a_topic_of_ours(topic: str) -> None:
    assert TOPICS.parse(topic) is None
    assert not TOPICS.may_publish("a", topic)
    assert not TOPICS.may_publish("coordinator", topic)
    assert not TOPICS.may_read("a", topic)


@pytest.mark.parametrize(
    ("identity", "writes", "reads"),
    [
        ("a", EVERY_TOPIC[4:7], EVERY_TOPIC[:4] + EVERY_TOPIC[7:9]),
        ("observer", [], EVERY_TOPIC),
        ("coordinator", EVERY_TOPIC[:4] + EVERY_TOPIC[7:9] + EVERY_TOPIC[12:], EVERY_TOPIC[:7] + EVERY_TOPIC[9:12]),
    ],
)
def test_an_identity_writes_and_reads_only_its_own(identity: str, writes: list[str], reads: list[str]) -> None:
    assert [topic for topic in EVERY_TOPIC if TOPICS.may_publish(identity, topic)] == writes
    assert [topic for topic in EVERY_TOPIC if TOPICS.may_read(identity, topic)] == reads


def test_the_access_list_gives_a_device_what_the_rules_give_it() -> None:
    acl = TOPICS.mosquitto_acl(["a", "b"], ["observer"])
    listed = acl.partition("user a\n")[2].partition("user b\n")[0].split("\n")
    for topic in EVERY_TOPIC:
        assert (f"topic write {topic}" in listed) == TOPICS.may_publish("a", topic)
        assert (f"topic read {topic}" in listed) == TOPICS.may_read("a", topic)
    assert len(list(filter(None, listed))) == 9


@pytest.mark.parametrize(
    "name", ["coordinator", "observer", "observer-2", "A", "a/b", "+", "#", "", "-a", "a" * 64, "a\n"]
)
def test_a_reserved_or_unusable_name_is_no_device_id(name: str) -> None:
    with pytest.raises(ValueError):
        topics.check_device_id(name)
    with pytest.raises(ValueError):
        TOPICS.mosquitto_acl([name])


def test_an_observer_must_be_named_as_one_or_its_rules_would_be_a_devices() -> None:
    with pytest.raises(ValueError, match="observer"):
        TOPICS.mosquitto_acl([], ["auditor"])


def test_a_federation_name_with_a_wildcard_is_refused() -> None:
    with pytest.raises(ValueError):
        topics.Topics("+")
