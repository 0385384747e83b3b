"""Frames as each version wrote them (tests/golden) are read by this version, and written the same."""

import json
from typing import get_args

import pytest

from fedcg.wire.messages.envelopes import open_envelope, read_envelope, seal
from fedcg.wire.messages.schemas import PROTOCOL_VERSION, SPOKEN, AnyMessage
from fedcg.wire.transfer.chunks import parse_chunk
from tests.support.wire.golden_files import GOLDEN, key_of, messages


def frames(version: int) -> dict[str, bytes]:
    stored = json.loads((GOLDEN / "frames" / f"protocol-{version}.json").read_text())
    return {kind: bytes.fromhex(text) for kind, text in stored.items()}


@pytest.mark.parametrize("version", SPOKEN)
def test_every_kind_of_message_has_a_golden_frame_that_is_read(version: int) -> None:
    stored = frames(version)
    assert parse_chunk(stored.pop("chunk")).data == (b"golden" * 100)[:256]
    assert {kind: read_envelope(frame).message.kind for kind, frame in stored.items()} == {
        kind: kind for kind in stored
    }
    assert stored.keys() >= {model.model_fields["kind"].default for model in get_args(AnyMessage)}


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.kind)
def test_a_golden_frame_opens_to_its_message_and_is_sealed_to_the_same_bytes(message: AnyMessage) -> None:
    frame = frames(PROTOCOL_VERSION)[message.kind]
    key = key_of(message)
    assert open_envelope(frame, lambda _sender: key.public) == message
    assert seal(message, key) == frame


@pytest.mark.parametrize("kind", ["hello", "welcome", "refusal"])
def test_the_messages_that_agree_on_a_version_keep_their_form_for_ever(kind: str) -> None:
    assert read_envelope(frames(1)[kind]).message.kind == kind
