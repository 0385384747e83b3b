"""Signed envelopes, the order in which messages are admitted, and the chain along which a device follows its coordinator's key."""

import json
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError, OrderError, SignatureError, TooLargeError, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import (
    DOMAIN,
    MAGIC,
    OVERHEAD_BYTES,
    BroadcastOrder,
    PinnedKey,
    Session,
    SigningKey,
    VerifyKey,
    make_link,
    open_envelope,
    open_key_chain,
    seal,
    session_id,
)
from fedcg.wire.messages.schemas import Accept, KeyLink, encode
from tests.support.wire.golden_files import messages

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


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (seal(MESSAGE, OTHER), "not signed by it"),
        (seal(MESSAGE.model_copy(update={"sender": "stranger"}), KEY), "not enrolled"),
        (MAGIC + KEY.sign(encode(MESSAGE)) + encode(MESSAGE), "not signed by it"),  # a signature for another purpose
    ],
)
def test_a_message_in_anothers_name_or_with_another_signature_is_refused(envelope: bytes, why: str) -> None:
    with pytest.raises(SignatureError, match=why):
        open_envelope(envelope, resolve)


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


def test_a_message_at_the_bound_is_not_refused_for_its_signature() -> None:
    payload = encode(MESSAGE) + b" " * (schemas.MAX_MESSAGE_BYTES - len(encode(MESSAGE)))
    assert open_envelope(MAGIC + KEY.sign(DOMAIN + payload) + payload, resolve) == MESSAGE


def test_a_key_survives_its_file_which_only_its_owner_can_read_and_no_other_key_replaces(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    assert open_envelope(seal(MESSAGE, SigningKey.load(path)), resolve) == MESSAGE


def test_a_kept_key_that_is_damaged_is_refused_and_one_of_another_program_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    KEY.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(MalformedError, match=f"{path} is damaged"):
        SigningKey.load(path)
    path.write_bytes(whole.partition(b"\n")[2])
    assert SigningKey.load(path).public == KEY.public
    path.write_text("-----BEGIN nonsense")
    with pytest.raises(MalformedError, match=f"{path} holds no private key"):
        SigningKey.load(path)


def test_the_secret_is_not_in_the_repr() -> None:
    assert KEY.public.hex in repr(KEY)
    assert len(repr(KEY)) < 100


def test_a_public_key_goes_through_hex_and_refuses_anything_else() -> None:
    assert VerifyKey.from_hex(KEY.public.hex + "\n") == KEY.public
    for text in ("", "zz", "00" * 31, "00" * 33):
        with pytest.raises(MalformedError):
            VerifyKey.from_hex(text)


FEDERATION = "casting"
KEYS = [SigningKey.generate() for _ in range(4)]
LINKS = [make_link(FEDERATION, n + 1, 5 + n, KEYS[n], KEYS[n + 1].public) for n in range(3)]
THIEF = SigningKey.generate()


def chain(links: Sequence[KeyLink] = LINKS, **changes: object) -> schemas.KeyChain:
    values = {
        "federation": FEDERATION,
        "sender": schemas.COORDINATOR,
        "recipient": schemas.EVERYONE,
        "links": tuple(links),
        **changes,
    }
    return schemas.KeyChain.model_validate(values)


def opened(message: schemas.KeyChain, pinned: PinnedKey, key: SigningKey = KEYS[3]) -> PinnedKey:
    return open_key_chain(seal(message, key), FEDERATION, pinned)


def pin(number: int, serial: int | None = None) -> PinnedKey:
    return PinnedKey(KEYS[number].public, number if serial is None else serial)


@pytest.mark.parametrize("number", range(4))
def test_the_chain_leads_from_every_earlier_key_to_the_last_also_where_its_serial_is_not_known(number: int) -> None:
    assert opened(chain(), pin(number)) == opened(chain(), pin(number, 0)) == pin(3)


def test_a_chain_whose_beginning_was_dropped_still_leads_on_from_a_key_that_is_in_it() -> None:
    assert opened(chain(LINKS[1:]), pin(1)) == pin(3)
    with pytest.raises(SignatureError, match="enrol this device again"):
        opened(chain(LINKS[1:]), pin(0))


def test_an_earlier_chain_does_not_lead_back() -> None:
    for serial in (3, 0):
        with pytest.raises((OrderError, SignatureError)):
            opened(chain(LINKS[:2]), pin(3, serial), KEYS[2])
    with pytest.raises(OrderError, match="a replay"):
        opened(chain(LINKS[:2]), pin(3), KEYS[2])


def test_whoever_stole_an_old_key_can_not_lead_a_device_that_has_left_it_anywhere() -> None:
    forked = make_link(FEDERATION, 1, 5, KEYS[0], THIEF.public)
    longer = [forked, make_link(FEDERATION, 2, 9, THIEF, SigningKey.generate().public)]
    with pytest.raises(OrderError, match="a replay"):
        opened(chain([forked]), pin(1), THIEF)
    with pytest.raises(SignatureError, match="enrol this device again"):
        opened(chain(longer), pin(1), THIEF)


def test_a_link_signed_by_another_key_is_refused() -> None:
    theft = make_link(FEDERATION, 1, 5, THIEF, THIEF.public).model_copy(update={"old": KEYS[0].public.hex})
    with pytest.raises(SignatureError, match="not signed by the key that it replaces"):
        opened(chain([theft]), pin(0), THIEF)


@pytest.mark.parametrize("change", [{"serial": 2}, {"epoch": 99}, {"new": THIEF.public.hex}, {"signature": "0" * 128}])
def test_an_altered_link_is_refused(change: dict[str, object]) -> None:
    altered = LINKS[0].model_copy(update=change)
    with pytest.raises(SignatureError):
        opened(chain([altered]), pin(0), THIEF if "new" in change else KEYS[1])


@pytest.mark.parametrize(
    ("links", "why"),
    [
        ([LINKS[0], LINKS[2]], "do not follow"),
        ([LINKS[1], LINKS[0]], "do not follow"),
        ([LINKS[0], make_link(FEDERATION, 2, 4, KEYS[1], KEYS[2].public)], "do not follow"),  # its epoch goes back
        ([LINKS[0], make_link(FEDERATION, 2, 6, KEYS[1], KEYS[0].public)], "occurs twice"),
    ],
)
def test_links_out_of_order_and_keys_that_come_back_are_refused(links: list[KeyLink], why: str) -> None:
    with pytest.raises(OrderError, match=why):
        opened(chain(links), pin(0))


def test_the_envelope_must_be_signed_by_the_last_key() -> None:
    for wrong in (KEYS[0], KEYS[2], THIEF):
        with pytest.raises(SignatureError, match="signed by the last"):
            opened(chain(), pin(0), wrong)


def test_what_is_no_chain_of_the_coordinator_is_refused() -> None:
    status = schemas.CoordinatorStatus(
        federation=FEDERATION, sender=schemas.COORDINATOR, recipient=schemas.EVERYONE, online=True
    )
    with pytest.raises(MalformedError, match="coordinator_status"):
        open_key_chain(seal(status, KEYS[0]), FEDERATION, pin(0))
    for change in ("sender", "recipient"):
        with pytest.raises(MalformedError):
            opened(chain(LINKS, **{change: "line-1"}), pin(0))
    for junk in (b"", b"FCG1", seal(chain(), KEYS[3])[:-1]):
        with pytest.raises(WireError):
            open_key_chain(junk, FEDERATION, pin(0))


def test_the_longest_chain_fits_a_message() -> None:
    big = LINKS[0].model_copy(update={"serial": 1 << 53, "epoch": 1 << 53})
    assert len(encode(chain([big] * schemas.MAX_KEY_LINKS))) < 16_000
    with pytest.raises(TooLargeError):
        open_key_chain(b"FCG1" + bytes(20_000), FEDERATION, pin(0))


OFFER, STATUS = messages()[0], messages()[2]


def offer(epoch: int, round_number: int, attempt: int) -> schemas.AnyMessage:
    return OFFER.model_copy(update={"epoch": epoch, "round": round_number, "attempt": attempt})


def status(epoch: int, *, online: bool) -> schemas.AnyMessage:
    return STATUS.model_copy(update={"epoch": epoch, "round": 0, "attempt": 0, "online": online})


def accept() -> Accept:
    return Accept(federation="f", sender="a", recipient="coordinator")


POSITIONS = st.tuples(*[st.integers(0, 3)] * 3)


@given(POSITIONS, st.lists(POSITIONS))
def test_admitted_broadcasts_never_go_back_from_where_the_order_stood_before_a_restart(
    first: tuple[int, int, int], positions: list[tuple[int, int, int]]
) -> None:
    order, admitted = BroadcastOrder(highest=first), [first]
    for position in positions:
        if position < admitted[-1]:
            with pytest.raises(OrderError):
                order.admit(offer(*position))
        else:
            order.admit(offer(*position))
            admitted.append(position)
    assert order.highest == admitted[-1] == max(admitted)


def test_a_coordinators_will_is_admitted_in_the_middle_of_its_epoch_and_sets_nothing_back() -> None:
    order = BroadcastOrder()
    order.admit(status(3, online=True))
    order.admit(offer(3, 5, 1))
    order.admit(status(3, online=False))
    assert order.highest == (3, 5, 1)


def test_the_status_of_a_new_epoch_shuts_out_the_old_one() -> None:
    order = BroadcastOrder(highest=(3, 5, 1))
    order.admit(status(4, online=True))
    assert order.highest == (4, 0, 0)
    with pytest.raises(OrderError):
        order.admit(offer(3, 6, 1))
    with pytest.raises(OrderError):
        order.admit(status(3, online=False))


def test_a_session_id_takes_both_nonces_and_their_order() -> None:
    first, second = "0" * 32, "1" * 32
    assert len(session_id(first, second)) == 64
    assert len({session_id(first, second), session_id(second, first), session_id(first, first)}) == 3
    assert session_id(first, second) == session_id(first, second)


def test_what_one_side_stamps_the_other_admits_once_and_in_order() -> None:
    device, coordinator = Session("5" * 64), Session("5" * 64)
    first, second, third = (device.stamp(accept()) for _ in range(3))
    assert [message.counter for message in (first, second, third)] == [1, 2, 3]
    coordinator.admit(first)
    coordinator.admit(third)
    for late in (first, second, third):
        with pytest.raises(OrderError):
            coordinator.admit(late)


def test_the_two_directions_count_for_themselves() -> None:
    device, coordinator = Session("5" * 64), Session("5" * 64)
    coordinator.admit(device.stamp(accept()))
    device.admit(coordinator.stamp(schemas.Invite(federation="f", sender="coordinator", recipient="a")))
    assert (device.next_out, device.last_in) == (2, 1)


def test_a_message_of_another_session_or_of_none_is_refused_and_not_counted() -> None:
    session = Session("5" * 64)
    with pytest.raises(OrderError, match="another session"):
        session.admit(Session("6" * 64).stamp(accept()))
    with pytest.raises(OrderError):
        session.admit(accept())
    assert session.last_in == 0
