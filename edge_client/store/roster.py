"""The cohort's roster: the key for sums of each device, as people carried it, and not the coordinator.

A card is one line of it: device, federation, public key for sums, the word `alone` where its owner consents to that, and that key's signature over
all of it. The signature shows that whoever made the line has the key. That the line is the right device's, people check: the mark of the whole roster
is the same on all devices, or a line was exchanged.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field

from edge_client.errors import CohortError
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey

MAX_ROSTER_BYTES = 1 << 20
_NAME = "[a-z0-9][a-z0-9-]{0,62}"
_CARD = re.compile(rf"({_NAME}) ({_NAME}) ([0-9a-f]{{64}})( alone)? ([0-9a-f]{{128}})")
COMPARE = (
    "Compare this mark with that of every other device, by voice or in person. Where one differs, somebody has exchanged a line, or it has "
    "another file: give all devices the same one"
)


@dataclass(frozen=True)
class Roster:
    """What people carried from device to device.

    Attributes:
        keys: for sums, by device.
        alone: the devices whose owners consent that all members may see the numbers of this device alone: the difference of two sums.
    """

    keys: dict[str, VerifyKey] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()


def card_of(device: str, federation: str, key: SigningKey, *, alone: bool = False) -> str:
    """A device's line of the roster of its federation; `alone`: its owner consents to that (`Roster.alone`)."""
    public, consent = key.public.hex, " alone" * alone
    return f"{device} {federation} {public}{consent} {key.sign(_signed(device, federation, public, consent)).hex()}"


def roster_of(text: str, federation: str, source: str) -> Roster:
    """The cards of a federation.

    Args:
        text: lines of `fedcg cohort card`; empty ones do not count.
        federation: whose cards they must be.
        source: where the text is from, for errors.

    Raises:
        CohortError: names the source and the line that is no such card, or is there twice.
    """
    roster, alone = dict[str, VerifyKey](), set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where, card = f"{source}, line {number}", _CARD.fullmatch(line.strip())
        if card is None:
            raise CohortError(f"{where} is not a whole card of `fedcg cohort card`: device, federation, key, signature")
        device, theirs, key, consent, signature = card.groups("")
        public = VerifyKey.from_hex(key)
        if not public.verifies(bytes.fromhex(signature), _signed(device, theirs, key, consent)):
            raise CohortError(f"{where}: the card of {device} is not signed by its own key; it was changed on the way")
        if theirs != federation:
            raise CohortError(f"{where}: the card of {device} is for federation {theirs}, not for {federation}")
        if device in roster or public in roster.values():
            raise CohortError(f"{where}: {device} or its key is there twice; keep its newest card alone")
        roster[device] = public
        alone |= {device} if consent else set()
    if not roster:
        raise CohortError(f"{source} holds no card of `fedcg cohort card`")
    return Roster(roster, frozenset(alone))


def roster_mark(roster: Roster, federation: str) -> str:
    """The mark of a roster: equal for equal rosters of a federation, 32 hex digits."""
    keys = {device: key.hex for device, key in roster.keys.items()}
    content = json.dumps([keys, sorted(roster.alone)], sort_keys=True)
    return hashlib.sha256(_label("roster", federation, content)).hexdigest()[:32]


def _signed(device: str, federation: str, key: str, consent: str) -> bytes:
    return _label("card", federation, device, key, consent)


def _label(purpose: str, *names: str) -> bytes:
    """Separates every use of a key and of a mark from all others."""
    return json.dumps(["fedcg/1 cohort", purpose, *names]).encode()
