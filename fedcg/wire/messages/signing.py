"""Signed envelopes: Ed25519 over the exact payload bytes, with a domain prefix.

An envelope is the magic, 64 bytes of signature, then the JSON of one message. Knows nothing of order or freshness (`ordering`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedcg.files import checked, with_check, write_durably
from fedcg.wire.errors import MalformedError, SignatureError, TooLargeError
from fedcg.wire.messages.messages import MAX_MESSAGE_BYTES, AnyMessage, decode, encode

MAGIC = b"FCG1"
DOMAIN = b"fedcg/1 envelope\0"
SIGNATURE_BYTES = 64
OVERHEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES
MAX_ENVELOPE_BYTES = MAX_MESSAGE_BYTES + OVERHEAD_BYTES


@dataclass(frozen=True)
class VerifyKey:
    """A public key, as its 32 raw bytes."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise MalformedError(f"a public key has 32 bytes, not {len(self.raw)}")

    @staticmethod
    def from_hex(text: str) -> VerifyKey:
        """The key in 64 hex digits; white space around them does not matter.

        Raises:
            MalformedError: anything else.
        """
        try:
            return VerifyKey(bytes.fromhex(text.strip()))
        except ValueError as error:
            raise MalformedError("a public key is written as 64 hex digits") from error

    @staticmethod
    def load_all(path: Path) -> tuple[VerifyKey, ...]:
        """Read the keys in a file, one a line, with or without the check that `file_of` gives it.

        Raises:
            OSError: the file can't be read.
            MalformedError: it is damaged, or holds anything else than keys.
        """
        try:
            lines = (checked(path.read_bytes()) or b"").decode("ascii").split()
            return tuple(map(VerifyKey.from_hex, lines or [""]))
        except (MalformedError, UnicodeDecodeError) as error:
            raise MalformedError(f"{path} is damaged: {error}") from error

    @staticmethod
    def file_of(*keys: str) -> bytes:
        """The content of a file of keys in hex."""
        return with_check("".join(f"{key}\n" for key in keys).encode())

    @property
    def hex(self) -> str:
        """The key in 64 hex digits."""
        return self.raw.hex()

    def verifies(self, signature: bytes, signed: bytes) -> bool:
        """Whether `signature` is this key's over exactly `signed`."""
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
        if check and content != with_check(begin + rest):  # another program's file has none
            raise MalformedError(f"{path} is damaged: it fails the check in its first line")
        try:
            private = load_pem_private_key(begin + rest, password=None)
        except (ValueError, TypeError) as error:
            raise MalformedError(f"{path} holds no private key in PEM form") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise MalformedError(f"{path} holds a private key that is not Ed25519")
        return SigningKey(private)

    def save(self, path: Path) -> None:
        """Write the key in PEM form behind its check, readable by its owner only; never over an existing file.

        Raises:
            FileExistsError: there is a file already.
        """
        pem = self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_durably(path, with_check(pem), is_new=True)

    @property
    def public(self) -> VerifyKey:
        """The public half."""
        return VerifyKey(self._private.public_key().public_bytes_raw())

    def sign(self, signed: bytes) -> bytes:
        """64 bytes of signature over exactly `signed`."""
        return self._private.sign(signed)


def seal(message: AnyMessage, key: SigningKey) -> bytes:
    """The envelope of a message.

    Raises:
        TooLargeError: the message is over 16 KB.
    """
    payload = encode(message)
    return MAGIC + key.sign(DOMAIN + payload) + payload


@dataclass(frozen=True)
class Envelope:
    """A message whose bounds and schema were checked, and a signature that was not yet."""

    message: AnyMessage
    signature: bytes
    payload: bytes

    def is_signed_by(self, key: VerifyKey) -> bool:
        """Whether the signature is this key's."""
        return key.verifies(self.signature, DOMAIN + self.payload)


def read_envelope(data: bytes) -> Envelope:
    """Take an envelope apart; its signature has still to be checked.

    Raises:
        TooLargeError: over the bound; nothing was parsed.
        MalformedError: no envelope, or no message of the schema in it.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise TooLargeError(f"an envelope of {len(data)} bytes is over the bound of {MAX_ENVELOPE_BYTES}")
    if len(data) <= OVERHEAD_BYTES or not data.startswith(MAGIC):
        raise MalformedError("not a signed envelope of this protocol")
    signature, payload = data[len(MAGIC) : OVERHEAD_BYTES], data[OVERHEAD_BYTES:]
    return Envelope(decode(payload), signature, payload)


def open_envelope(data: bytes, resolve: Callable[[str], VerifyKey | None]) -> AnyMessage:
    """The message in an envelope, after its bounds, its schema and its sender's signature were checked.

    Args:
        data: the bytes as they came.
        resolve: the public key of a sender's id, or None when no device of that name is enrolled.

    Raises:
        TooLargeError: over the bound; nothing was parsed.
        MalformedError: no envelope, or no message of the schema in it.
        SignatureError: an unknown sender, or a signature that is not the sender's.
    """
    envelope = read_envelope(data)
    message = envelope.message
    key = resolve(message.sender)
    if key is None:
        raise SignatureError(f"a {message.kind} message of a sender that is not enrolled")
    if not envelope.is_signed_by(key):
        raise SignatureError(f"a {message.kind} message claims to be from {message.sender!r} but is not signed by it")
    return message
