import json

import pytest

from fedcg.wire.errors import MalformedError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.schemas import PROTOCOL_VERSION, Decline, DeclineReason, Hello, Manifest, Need, decode, encode

DECLINE = Decline(federation="f", sender="a", recipient="coordinator", reason=DeclineReason.NO_DATA)


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(DECLINE)), **fields}).encode()


def test_the_longest_need_fits_into_a_message() -> None:
    ranges = tuple((index * 2**30, 2**20) for index in range(256))
    need = Need(federation="f" * 63, sender="a" * 63, recipient="b" * 63, artifact="0" * 64, ranges=ranges)
    assert decode(encode(need)) == need


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "surprise"},
        {"extra": 1},
        {"reason": "my own words"},
        {"v": 2},
        {"round": -1},
        {"round": "1"},
        {"sender": "A"},
        {"session": "00"},
    ],
)
def test_an_unknown_kind_field_or_value_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        decode(changed(**fields))


@pytest.mark.parametrize(
    "artifact",
    [
        {"id": "../../etc", "size": 10, "chunk_bytes": 1000},
        {"id": "0" * 64, "size": 0, "chunk_bytes": 1000},
        {"id": "0" * 64, "size": 1 << 40, "chunk_bytes": 1000},
        {"id": "0" * 64, "size": 10, "chunk_bytes": 1},
    ],
)
def test_a_manifest_of_impossible_size_or_name_is_refused(artifact: dict[str, object]) -> None:
    base = json.loads(changed(kind="manifest", artifact={"id": "0" * 64, "size": 10, "chunk_bytes": 1000}))
    del base["reason"]
    assert isinstance(decode(json.dumps(base).encode()), Manifest)
    with pytest.raises(MalformedError):
        decode(json.dumps({**base, "artifact": artifact}).encode())


def hello(**fields: object) -> bytes:
    values = {"kind": "hello", "federation": "f", "sender": "a", "recipient": "coordinator", "nonce": "0" * 32}
    return json.dumps({**values, "versions": [1], "agent": "0.1.0", **fields}).encode()


def test_a_hello_of_a_later_version_is_read_past_its_new_fields() -> None:
    """Else it could not be told which side to update."""
    message = decode(hello(versions=[PROTOCOL_VERSION + 1], mood="good"))
    assert isinstance(message, Hello)
    assert message.versions == (PROTOCOL_VERSION + 1,)


@pytest.mark.parametrize(
    "fields", [{"mood": "good"}, {"versions": []}, {"versions": [0]}, {"versions": list(range(9))}]
)
def test_a_hello_of_this_version_is_as_strict_as_everything_else(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        decode(hello(**fields))


def test_a_refusal_names_both_sides_and_the_one_that_is_behind() -> None:
    assert schemas.outdated((1,), (2, 3)) == "device"
    assert schemas.outdated((4, 5), (2, 3)) == "coordinator"
    told = schemas.explain_versions((1,), (2, 3))
    assert told == "the device supports protocol version 1, the coordinator 2, 3: update the agent on this device"
    assert "update the coordinator" in schemas.explain_versions((4, 5), (2, 3))
