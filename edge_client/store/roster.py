"""The cohort's roster: each device's key for sums, exchanged by people and not through the coordinator.

A card is one line of it: device, federation, public key for sums, the word `alone` if its owner agrees to it, and the key's signature over all
of it. The signature proves that the card's creator has the key. People check that the line is from the right device: the mark of the whole
roster must be the same on all devices. Otherwise a line was exchanged.
"""

import hashlib
import json
import re
from dataclasses import field

from edge_client.errors import CohortError
from fedcg.values import Value
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey

MAX_ROSTER_BYTES = 1 << 20
_NAME = "[a-z0-9][a-z0-9-]{0,62}"
_CARD = re.compile(rf"({_NAME}) ({_NAME}) ([0-9a-f]{{64}})( alone)? ([0-9a-f]{{128}})")
COMPARE = (
    "Compare this mark with every other device's mark, by voice or in person. If one differs, a line was exchanged or a device has "
    "another file: use the same file on all devices"
)


class Roster(Value):
    """The cards that people exchanged between devices.

    Attributes:
        keys: for sums, by device.
        alone: devices whose owners agree that members may see their individual numbers, as the difference of two sums.
    """

    keys: dict[str, VerifyKey] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()


def card_of(device: str, federation: str, key: SigningKey, *, alone: bool = False) -> str:
    """A device's line in the roster of its federation. `alone`: its owner agrees to that (`Roster.alone`)."""
    public, consent = key.public.hex, " alone" * alone
    return f"{device} {federation} {public}{consent} {key.sign(_signed(device, federation, public, consent)).hex()}"


def roster_of(text: str, federation: str, source: str) -> Roster:
    """The cards of a federation.

    Args:
        text: lines from `fedcg cohort card`; empty lines are ignored.
        federation: the federation that the cards must be for.
        source: origin of the text, for errors.

    Raises:
        CohortError: names the source and the line that is invalid or repeated.
    """
    roster, alone = dict[str, VerifyKey](), set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where, card = f"{source}, line {number}", _CARD.fullmatch(line.strip())
        if card is None:
            raise CohortError(f"{where} is not a full card of `fedcg cohort card`: device, federation, key, signature")
        device, theirs, key, consent, signature = card.groups("")
        public = VerifyKey.from_hex(key)
        if not public.verifies(bytes.fromhex(signature), _signed(device, theirs, key, consent)):
            raise CohortError(f"{where}: the card of {device} is not signed by its own key; it was changed in transit")
        if theirs != federation:
            raise CohortError(f"{where}: the card of {device} is for federation {theirs}, not for {federation}")
        if device in roster or public in roster.values():
            raise CohortError(f"{where}: {device} or its key occurs twice; keep only its newest card")
        roster[device] = public
        alone |= {device} if consent else set()
    if not roster:
        raise CohortError(f"{source} contains no card of `fedcg cohort card`")
    return Roster(roster, frozenset(alone))


def roster_mark(roster: Roster, federation: str) -> str:
    """The mark of a roster: 32 hex digits, equal for equal rosters of a federation."""
    keys = {device: key.hex for device, key in roster.keys.items()}
    content = json.dumps([keys, sorted(roster.alone)], sort_keys=True)
    return hashlib.sha256(_label("roster", federation, content)).hexdigest()[:32]


def _signed(device: str, federation: str, key: str, consent: str) -> bytes:
    return _label("card", federation, device, key, consent)


def _label(purpose: str, *names: str) -> bytes:
    """A prefix that separates the different uses of keys and marks."""
    return json.dumps(["fedcg/1 cohort", purpose, *names]).encode()
