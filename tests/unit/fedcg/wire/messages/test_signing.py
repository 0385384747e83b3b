import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError, SignatureError, TooLargeError, WireError
from fedcg.wire.messages.envelopes import DOMAIN, MAGIC, OVERHEAD_BYTES, SigningKey, VerifyKey, open_envelope, seal
from fedcg.wire.messages.schemas import MAX_MESSAGE_BYTES, Accept, encode

KEY = SigningKey.generate()
OTHER = SigningKey.generate()
MESSAGE = Accept(federation="casting", sender="a", recipient="coordinator", epoch=1, round=2, attempt=1)


def resolve(sender: str) -> VerifyKey | None:
    return {"a": KEY.public, "b": OTHER.public}.get(sender)


def test_an_envelope_is_magic_signature_and_the_exact_json() -> None:
    data = seal(MESSAGE, KEY)
    assert data[:4] == MAGIC == b"FCG1"
    assert data[OVERHEAD_BYTES:] == encode(MESSAGE)
    assert KEY.public.verifies(data[4:68], b"fedcg/1 envelope\0" + encode(MESSAGE))


def test_a_signature_for_another_purpose_does_not_open_an_envelope() -> None:
    payload = encode(MESSAGE)
    assert DOMAIN
    with pytest.raises(SignatureError):
        open_envelope(MAGIC + KEY.sign(payload) + payload, resolve)


def test_a_message_in_anothers_name_is_refused() -> None:
    with pytest.raises(SignatureError, match="not signed by it"):
        open_envelope(seal(MESSAGE, OTHER), resolve)


def test_a_sender_that_is_not_enrolled_is_refused() -> None:
    stranger = MESSAGE.model_copy(update={"sender": "stranger"})
    with pytest.raises(SignatureError, match="not enrolled"):
        open_envelope(seal(stranger, KEY), resolve)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int) -> None:
    data = bytearray(seal(MESSAGE, KEY))
    data[position % len(data)] ^= change
    with pytest.raises(WireError):
        open_envelope(bytes(data), resolve)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_an_error_of_the_wire(data: bytes) -> None:
    with pytest.raises(WireError):
        open_envelope(data, resolve)
    with pytest.raises(WireError):
        open_envelope(MAGIC + bytes(64) + data, resolve)


EVIL = "EVIL\n\x1b[2J"
FORGED = [
    {EVIL: 1},
    {"kind": EVIL},
    {"kind": "accept", EVIL: EVIL},
    {"kind": "accept", "federation": EVIL, "sender": EVIL},
    {"kind": "manifest", "artifact": {EVIL: EVIL}},
    {"kind": "sum_up", "body": {"step": EVIL}},
    {"kind": "sum_up", "body": {"step": "shares", "shares": {EVIL: EVIL}}},
    {"kind": "hello", "nonce": "0" * 32, "versions": [1], "agent": "1", EVIL: 1},
    {**MESSAGE.model_dump(mode="json"), "sender": "evil-name"},
    {**MESSAGE.model_dump(mode="json"), EVIL: 1},
    *({**MESSAGE.model_dump(mode="json"), name: EVIL} for name in MESSAGE.model_dump()),
]


@pytest.mark.parametrize("content", FORGED, ids=str)
def test_a_refused_envelope_is_described_without_a_name_or_a_value_of_its_content(content: dict[str, object]) -> None:
    filled = {"federation": "casting", "sender": "a", "recipient": "coordinator", **content}
    with pytest.raises(WireError) as refused:
        open_envelope(MAGIC + bytes(64) + json.dumps(filled).encode(), resolve)
    assert "evil" not in str(refused.value).lower()
    assert str(refused.value).isprintable()


def test_an_envelope_over_the_bound_is_refused_unread() -> None:
    with pytest.raises(TooLargeError):
        open_envelope(MAGIC + bytes(64) + b" " * MAX_MESSAGE_BYTES + b"{", resolve)


def test_a_message_at_the_bound_is_not_refused_for_its_signature() -> None:
    payload = encode(MESSAGE) + b" " * (MAX_MESSAGE_BYTES - len(encode(MESSAGE)))
    assert open_envelope(MAGIC + KEY.sign(DOMAIN + payload) + payload, resolve) == MESSAGE


def test_a_key_survives_its_file_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_envelope(seal(MESSAGE, SigningKey.load(path)), resolve) == MESSAGE


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    KEY.save(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    assert path.read_bytes() == before


def test_a_kept_key_with_any_flipped_bit_is_refused_and_one_of_another_program_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    KEY.save(path)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(MalformedError, match=rf"{path} (is damaged|holds no private key)"):
            SigningKey.load(path)
    path.write_bytes(whole.partition(b"\n")[2])
    assert SigningKey.load(path).public == KEY.public


def test_a_damaged_key_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    path.write_text("nonsense")
    with pytest.raises(MalformedError, match=r"signing\.key"):
        SigningKey.load(path)


def test_the_secret_is_not_in_the_repr() -> None:
    assert KEY.public.hex in repr(KEY)
    assert len(repr(KEY)) < 100


def test_a_public_key_goes_through_hex_and_refuses_anything_else() -> None:
    assert VerifyKey.from_hex(KEY.public.hex + "\n") == KEY.public
    for text in ("", "zz", "00" * 31, "00" * 33):
        with pytest.raises(MalformedError):
            VerifyKey.from_hex(text)
