"""Signed envelopes: Ed25519 over the exact payload bytes, changes of the coordinator's key, and the order of admitted messages.

Order, not time, prevents replay. This module must not know the broker or where chains are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import BaseModel

from fedcg.files import checked, with_check, write_durably
from fedcg.values import Value
from fedcg.wire import errors
from fedcg.wire.messages import schemas

MAGIC = b"FCG1"
DOMAIN = b"fedcg/1 envelope\0"
PRIVATE_PEM = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
"""How private keys are encoded in files, which only their owner may read."""
SIGNATURE_BYTES = 64
OVERHEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES
MAX_ENVELOPE_BYTES = schemas.MAX_MESSAGE_BYTES + OVERHEAD_BYTES


class VerifyKey(Value):
    """A public key, as its 32 raw bytes."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise errors.MalformedError(f"a public key has 32 bytes, not {len(self.raw)}")

    @staticmethod
    def from_hex(text: str) -> VerifyKey:
        """The key from 64 hex digits; surrounding white space is ignored.

        Raises:
            MalformedError: anything else.
        """
        try:
            return VerifyKey(bytes.fromhex(text.strip()))
        except ValueError as error:
            raise errors.MalformedError("a public key is written as 64 hex digits") from error

    @staticmethod
    def load_all(path: Path) -> tuple[VerifyKey, ...]:
        """Read the keys in a file, one per line, with or without the checksum that `file_of` adds.

        Raises:
            OSError: the file can't be read.
            MalformedError: it is damaged, or holds anything other than keys.
        """
        try:
            lines = (checked(path.read_bytes()) or b"").decode("ascii").split()
            return tuple(map(VerifyKey.from_hex, lines or [""]))
        except (errors.MalformedError, UnicodeDecodeError) as error:
            raise errors.MalformedError(f"{path} is damaged: {error}") from error

    @staticmethod
    def file_of(*keys: str) -> bytes:
        """The content of a file of keys in hex."""
        return with_check("".join(f"{key}\n" for key in keys).encode())

    @property
    def hex(self) -> str:
        """The key in 64 hex digits."""
        return self.raw.hex()

    def verifies(self, signature: bytes, signed: bytes) -> bool:
        """Whether `signature` is this key's signature over exactly `signed`."""
        try:
            self._key.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    @cached_property
    def _key(self) -> Ed25519PublicKey:
        return Ed25519PublicKey.from_public_bytes(self.raw)


class SigningKey:
    """A private Ed25519 key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex})"

    @staticmethod
    def generate() -> SigningKey:
        """A new key from the operating system's randomness."""
        return SigningKey(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: Path) -> SigningKey:
        """Read a key that `save` wrote.

        Raises:
            OSError: the file can't be read.
            MalformedError: it holds no Ed25519 private key, or is damaged.
        """
        content = path.read_bytes()
        check, begin, rest = content.partition(b"-----BEGIN")
        if check and content != with_check(begin + rest):  # a file of another program has no checksum
            raise errors.MalformedError(f"{path} is damaged: it does not match the checksum in its first line")
        try:
            private = load_pem_private_key(begin + rest, password=None)
        except (ValueError, TypeError) as error:
            raise errors.MalformedError(f"{path} holds no private key in PEM form") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise errors.MalformedError(f"{path} holds a private key that is not Ed25519")
        return SigningKey(private)

    def save(self, path: Path) -> None:
        """Write the key in PEM form after its checksum, readable only by its owner; never overwrites a file.

        Raises:
            FileExistsError: the file exists.
        """
        pem = self._private.private_bytes(*PRIVATE_PEM)
        write_durably(path, with_check(pem), is_new=True)

    @property
    def public(self) -> VerifyKey:
        """The public half."""
        return VerifyKey(self._private.public_key().public_bytes_raw())

    def sign(self, signed: bytes) -> bytes:
        """The signature over exactly `signed`, 64 bytes."""
        return self._private.sign(signed)


def seal(message: schemas.AnyMessage, key: SigningKey) -> bytes:
    """The envelope of a message.

    Raises:
        TooLargeError: the message is over 16 KB.
    """
    payload = schemas.encode(message)
    return MAGIC + key.sign(DOMAIN + payload) + payload


class Envelope(Value):
    """A message with checked size and schema, and a signature that is not yet checked."""

    message: schemas.AnyMessage
    signature: bytes
    payload: bytes

    def is_signed_by(self, key: VerifyKey) -> bool:
        """Whether the signature is this key's."""
        return key.verifies(self.signature, DOMAIN + self.payload)


def read_envelope(data: bytes) -> Envelope:
    """Parse an envelope without checking its signature.

    Raises:
        TooLargeError: over the bound; nothing was parsed.
        MalformedError: not an envelope, or without a message of the schema.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise errors.TooLargeError(f"an envelope of {len(data)} bytes is over the bound of {MAX_ENVELOPE_BYTES}")
    if len(data) <= OVERHEAD_BYTES or not data.startswith(MAGIC):
        raise errors.MalformedError("not a signed envelope of this protocol")
    signature, payload = data[len(MAGIC) : OVERHEAD_BYTES], data[OVERHEAD_BYTES:]
    return Envelope(schemas.decode(payload), signature, payload)


def open_envelope(data: bytes, resolve: Callable[[str], VerifyKey | None]) -> schemas.AnyMessage:
    """The message in an envelope, after checks of its size, its schema and its sender's signature.

    Args:
        data: the received bytes.
        resolve: returns the public key of a sender's id, or None if no device with that id is enrolled.

    Raises:
        TooLargeError: over the bound; nothing was parsed.
        MalformedError: not an envelope, or without a message of the schema.
        SignatureError: an unknown sender, or a signature that is not the sender's.
    """
    envelope = read_envelope(data)
    message = envelope.message
    key = resolve(message.sender)
    if key is None:
        raise errors.SignatureError(f"a {message.kind} message of a sender that is not enrolled")
    if not envelope.is_signed_by(key):
        raise errors.SignatureError(
            f"a {message.kind} message claims to be from {message.sender!r} but is not signed by it"
        )
    return message


LINK_DOMAIN = "fedcg/1 coordinator key"


class PinnedKey(Value):
    """The coordinator's valid key.

    Attributes:
        key: its public half.
        serial: of its link in the chain; 0 for the key from enrolment, whose position is not known.
    """

    key: VerifyKey
    serial: int = 0


def make_link(federation: str, serial: int, epoch: int, old: SigningKey, new: VerifyKey) -> schemas.KeyLink:
    """The signed statement that `new` replaces `old`.

    Args:
        federation: of the coordinator.
        serial: 1 for the first replacement, then counting up.
        epoch: the coordinator's last lease.
        old: the key that was valid until now; it signs.
        new: the key that is valid from now on.
    """
    signature = old.sign(_statement(federation, serial, epoch, old.public.hex, new.hex))
    return schemas.KeyLink(serial=serial, epoch=epoch, old=old.public.hex, new=new.hex, signature=signature.hex())


def open_key_chain(data: bytes, federation: str, pinned: PinnedKey) -> PinnedKey:
    """The key to pin after receiving an envelope with a chain: the last of the chain, or the one that is already pinned.

    Args:
        data: the received bytes.
        federation: the federation whose messages are accepted.
        pinned: the key that was valid until now.

    Raises:
        MalformedError: not an envelope with a chain, or one for another recipient.
        SignatureError: a link or the envelope is not signed by the expected key, or the chain lacks the pinned key.
        OrderError: the chain ends before the pinned key, or its links are not in order.
    """
    envelope = read_envelope(data)
    chain = envelope.message
    if (
        not isinstance(chain, schemas.KeyChain)
        or chain.sender != schemas.COORDINATOR
        or chain.recipient != schemas.EVERYONE
    ):
        raise errors.MalformedError(
            f"a {chain.kind} message of {chain.sender!r} where the coordinator's keys are published"
        )
    if chain.federation != federation:
        raise errors.OtherFederationError(f"the coordinator's keys of federation {chain.federation!r}")
    followed = follow(chain, pinned)
    if not envelope.is_signed_by(followed.key):
        raise errors.SignatureError("a chain of keys that is not signed by the last of them")
    return followed


def follow(chain: schemas.KeyChain, pinned: PinnedKey) -> PinnedKey:
    """Like `open_key_chain`, for a chain whose envelope and addressee the caller has checked.

    Raises:
        SignatureError, OrderError: as above.
    """
    check_links(chain)
    last = chain.links[-1]
    if last.new == pinned.key.hex:
        if pinned.serial not in (0, last.serial):
            raise errors.OrderError(f"the pinned key has serial {pinned.serial}, not {last.serial}")
        return PinnedKey(pinned.key, last.serial)
    if pinned.serial >= last.serial:
        raise errors.OrderError(
            f"a chain of keys that ends at {last.serial} came after key {pinned.serial} was pinned: a replay, or a "
            "coordinator whose directory was restored from a backup"
        )
    onward = next((link for link in chain.links if link.old == pinned.key.hex), None)
    if onward is None:
        raise errors.SignatureError(
            "a chain of keys without the key that is pinned here; if the operator changed the key, enrol this device again"
        )
    if pinned.serial not in (0, onward.serial - 1):
        raise errors.OrderError(f"key {pinned.serial} is pinned, and the chain continues from it with {onward.serial}")
    return PinnedKey(VerifyKey.from_hex(last.new), last.serial)


def check_links(chain: schemas.KeyChain) -> None:
    """Check that every link is signed by the key it replaces and follows the one before; the first key is not checked.

    Raises:
        SignatureError, OrderError: otherwise.
    """
    for link in chain.links:
        statement = _statement(chain.federation, link.serial, link.epoch, link.old, link.new)
        if not VerifyKey.from_hex(link.old).verifies(bytes.fromhex(link.signature), statement):
            raise errors.SignatureError(f"key {link.serial} of the chain is not signed by the key that it replaces")
    for link, following in pairwise(chain.links):
        if following.serial != link.serial + 1 or following.old != link.new or following.epoch < link.epoch:
            raise errors.OrderError(f"keys {link.serial} and {following.serial} of the chain do not follow one another")
    keys = [chain.links[0].old, *(link.new for link in chain.links)]
    if len(set(keys)) < len(keys):
        raise errors.OrderError("a key occurs twice in the chain")


def _statement(federation: str, serial: int, epoch: int, old: str, new: str) -> bytes:
    return f"{LINK_DOMAIN}\0{federation}\0{serial}\0{epoch}\0{old}\0{new}".encode()


Position = tuple[int, int, int]
START: Position = (0, 0, 0)
MessageT = TypeVar("MessageT", bound=BaseModel)


class BroadcastOrder:
    """The highest (epoch, round, attempt) admitted from a coordinator; survives restarts if `highest` is stored."""

    def __init__(self, highest: Position = START) -> None:
        self.highest = highest
        self._is_over = False  # the highest position is that of a `Finished`

    def admit(self, message: schemas.AnyMessage) -> None:
        """Admit a broadcast; an equal position is admitted, because retained messages repeat.

        A coordinator's status concerns only its epoch: its will is signed before any round of the epoch is known. `Finished`
        follows the offer of the same position.

        Raises:
            OldEpochError: its coordinator lost the lease.
            ReplayError: it is older than an admitted message.
        """
        position = (message.epoch, message.round, message.attempt)
        if message.epoch < self.highest[0]:
            raise errors.OldEpochError(
                f"a {message.kind} message of epoch {message.epoch} came after epoch {self.highest[0]}: "
                "a replay, or a coordinator that lost its lease"
            )
        if isinstance(message, schemas.CoordinatorStatus):
            position = max(self.highest, (message.epoch, 0, 0))
        is_after_the_end = self._is_over and isinstance(message, schemas.Offer) and position == self.highest
        if position < self.highest or is_after_the_end:
            raise errors.ReplayError(
                f"a {message.kind} message of (epoch, round, attempt) {position} came after {self.highest}"
            )
        if position > self.highest or isinstance(message, schemas.Finished):
            self._is_over = isinstance(message, schemas.Finished)
        self.highest = position


def session_id(device_nonce: str, coordinator_nonce: str) -> str:
    """The session id derived from two nonces: a sha256 in 64 hex digits."""
    return hashlib.sha256(f"fedcg/1 session\0{device_nonce}\0{coordinator_nonce}".encode()).hexdigest()


@dataclass
class Session:
    """One side of a session: stamps outgoing messages, admits incoming ones.

    Attributes:
        session_id: from `session_id`.
        next_out: the counter of the next message out; starts at 1.
        last_in: the highest received counter.
    """

    session_id: str
    next_out: int = 1
    last_in: int = 0

    def stamp(self, message: MessageT) -> MessageT:
        """The message with this session and the next counter."""
        stamped = message.model_copy(update={"session": self.session_id, "counter": self.next_out})
        self.next_out += 1
        return stamped

    def admit(self, message: schemas.AnyMessage) -> None:
        """Admit a message of the other side.

        Raises:
            OtherSessionError: it is of another session.
            ReplayError: its counter was already used.
        """
        if message.session != self.session_id:
            raise errors.OtherSessionError(f"a {message.kind} message of another session")
        if message.counter <= self.last_in:
            raise errors.ReplayError(f"{message.kind} message with counter {message.counter} came after {self.last_in}")
        self.last_in = message.counter
