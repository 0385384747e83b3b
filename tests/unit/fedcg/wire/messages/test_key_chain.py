"""A device follows its coordinator's key forward along signed links, and nowhere else."""

from collections.abc import Sequence

import pytest

from fedcg.wire.errors import MalformedError, OrderError, SignatureError, TooLargeError, WireError
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey, make_link, open_key_chain, seal
from fedcg.wire.messages.schemas import (
    COORDINATOR,
    EVERYONE,
    MAX_KEY_LINKS,
    CoordinatorStatus,
    KeyChain,
    KeyLink,
    encode,
)

FEDERATION = "casting"
KEYS = [SigningKey.generate() for _ in range(4)]
LINKS = [make_link(FEDERATION, n + 1, 5 + n, KEYS[n], KEYS[n + 1].public) for n in range(3)]
THIEF = SigningKey.generate()


def chain(links: Sequence[KeyLink] = LINKS, **changes: object) -> KeyChain:
    values = {"federation": FEDERATION, "sender": COORDINATOR, "recipient": EVERYONE, "links": tuple(links), **changes}
    return KeyChain.model_validate(values)


def opened(message: KeyChain, pinned: PinnedKey, key: SigningKey = KEYS[3]) -> PinnedKey:
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


def test_a_link_of_another_federation_is_refused() -> None:
    foreign = make_link("other", 1, 5, KEYS[0], KEYS[1].public)
    with pytest.raises(SignatureError, match="not signed"):
        opened(chain([foreign]), pin(0), KEYS[1])
    with pytest.raises(MalformedError, match="'other'"):
        opened(chain([foreign], federation="other"), pin(0), KEYS[1])


@pytest.mark.parametrize(
    ("links", "why"),
    [
        ([LINKS[0], LINKS[2]], "do not follow"),
        ([LINKS[1], LINKS[0]], "do not follow"),
        ([LINKS[0], make_link(FEDERATION, 2, 4, KEYS[1], KEYS[2].public)], "do not follow"),  # its epoch goes back
        ([LINKS[0], make_link(FEDERATION, 2, 6, KEYS[1], KEYS[0].public)], "comes back"),
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
    status = CoordinatorStatus(federation=FEDERATION, sender=COORDINATOR, recipient=EVERYONE, online=True)
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
    assert len(encode(chain([big] * MAX_KEY_LINKS))) < 16_000
    with pytest.raises(TooLargeError):
        open_key_chain(b"FCG1" + bytes(20_000), FEDERATION, pin(0))
