"""Changes of the coordinator's message key: links, each signed by the key that it replaces, kept as one chain.

The chain's own order defeats replay: a device follows links only forward from the key that it has pinned, and a pinned key
is never replaced by one that came before it. Knows no files and no broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fedcg.wire.errors import MalformedError, OrderError, OtherFederationError, SignatureError
from fedcg.wire.messages.messages import COORDINATOR, EVERYONE, KeyChain, KeyLink
from fedcg.wire.messages.signing import SigningKey, VerifyKey, read_envelope

LINK_DOMAIN = "fedcg/1 coordinator key"


@dataclass(frozen=True)
class PinnedKey:
    """The coordinator's key that counts.

    Attributes:
        key: its public half.
        serial: of the link that brought it; 0 as it came at enrolment, when its place in the chain is not known.
    """

    key: VerifyKey
    serial: int = 0


def make_link(federation: str, serial: int, epoch: int, old: SigningKey, new: VerifyKey) -> KeyLink:
    """The signed statement that `new` replaces `old`.

    Args:
        federation: whose coordinator it is.
        serial: 1 for the first replacement, then one more each.
        epoch: the coordinator's last lease.
        old: the key that counts until now; it signs.
        new: the key that counts from now on.
    """
    signature = old.sign(_statement(federation, serial, epoch, old.public.hex, new.hex))
    return KeyLink(serial=serial, epoch=epoch, old=old.public.hex, new=new.hex, signature=signature.hex())


def open_key_chain(data: bytes, federation: str, pinned: PinnedKey) -> PinnedKey:
    """The key to pin after an envelope with a chain: the last of the chain, or the one pinned already.

    Args:
        data: the bytes as they came.
        federation: the federation whose messages are accepted.
        pinned: the key that counts until now.

    Raises:
        MalformedError: no envelope with a chain in it, or one for another recipient.
        SignatureError: a link or the envelope is not signed by the key it should be, or the chain is not of the pinned key.
        OrderError: the chain ends before the pinned key, or its links are not in order.
    """
    envelope = read_envelope(data)
    chain = envelope.message
    if not isinstance(chain, KeyChain) or chain.sender != COORDINATOR or chain.recipient != EVERYONE:
        raise MalformedError(f"a {chain.kind} message of {chain.sender!r} where the coordinator's keys are published")
    if chain.federation != federation:
        raise OtherFederationError(f"the coordinator's keys of federation {chain.federation!r}")
    followed = follow(chain, pinned)
    if not envelope.is_signed_by(followed.key):
        raise SignatureError("a chain of keys that is not signed by the last of them")
    return followed


def follow(chain: KeyChain, pinned: PinnedKey) -> PinnedKey:
    """Like `open_key_chain`, for a chain whose envelope and addressee the caller has checked.

    Raises:
        SignatureError, OrderError: as above.
    """
    check_links(chain)
    last = chain.links[-1]
    if last.new == pinned.key.hex:
        if pinned.serial not in (0, last.serial):
            raise OrderError(f"the pinned key has serial {pinned.serial}, not {last.serial}")
        return PinnedKey(pinned.key, last.serial)
    if pinned.serial >= last.serial:
        raise OrderError(
            f"a chain of keys that ends at {last.serial} came after key {pinned.serial} was pinned: a replay, or a "
            "coordinator whose directory was restored from a backup"
        )
    onward = next((link for link in chain.links if link.old == pinned.key.hex), None)
    if onward is None:
        raise SignatureError(
            "a chain of keys without the key that is pinned here; if the operator changed the key, enrol this device again"
        )
    if pinned.serial not in (0, onward.serial - 1):
        raise OrderError(f"key {pinned.serial} is pinned, and the chain goes on from it with {onward.serial}")
    return PinnedKey(VerifyKey.from_hex(last.new), last.serial)


def check_links(chain: KeyChain) -> None:
    """Check that every link is signed by the key it replaces and follows the one before; the first key is not checked.

    Raises:
        SignatureError, OrderError: they don't.
    """
    for link in chain.links:
        statement = _statement(chain.federation, link.serial, link.epoch, link.old, link.new)
        if not VerifyKey.from_hex(link.old).verifies(bytes.fromhex(link.signature), statement):
            raise SignatureError(f"key {link.serial} of the chain is not signed by the key that it replaces")
    for link, following in pairwise(chain.links):
        if following.serial != link.serial + 1 or following.old != link.new or following.epoch < link.epoch:
            raise OrderError(f"keys {link.serial} and {following.serial} of the chain do not follow one another")
    keys = [chain.links[0].old, *(link.new for link in chain.links)]
    if len(set(keys)) < len(keys):
        raise OrderError("a key comes back in the chain")


def _statement(federation: str, serial: int, epoch: int, old: str, new: str) -> bytes:
    return f"{LINK_DOMAIN}\0{federation}\0{serial}\0{epoch}\0{old}\0{new}".encode()
