from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError, TooLargeError, WireError
from fedcg.wire.messages import Decline, DeclineReason, Manifest, Need, decode, encode

DECLINE = Decline(federation="f", sender="a", recipient="coordinator", reason=DeclineReason.NO_DATA)


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(DECLINE)), **fields}).encode()


def test_a_message_survives_the_wire() -> None:
    assert decode(encode(DECLINE)) == DECLINE


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
        {"round": True},
        {"sender": "A"},
        {"sender": "*"},
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
    good = {"id": "0" * 64, "size": 10, "chunk_bytes": 1000}
    base = json.loads(changed(kind="manifest", artifact=good))
    del base["reason"]
    assert isinstance(decode(json.dumps(base).encode()), Manifest)
    with pytest.raises(MalformedError):
        decode(json.dumps({**base, "artifact": artifact}).encode())


def test_an_oversize_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLargeError):
        decode(b"[" * 20_000)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_give_an_error_of_the_wire(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)
