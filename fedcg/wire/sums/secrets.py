"""What a device draws for one sum, what it announces of that, and the keys that two devices agree on.

Three secrets of 16 bytes: one makes the key that shares are sealed with, one the key of the masks that it has with every other device, one its
own mask. 16 bytes, so that each is one Shamir share over GF(2^128); X25519's 32 bytes follow from them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedcg.wire.errors import MalformedError, SignatureError, SumError
from fedcg.wire.messages.signing import SigningKey, VerifyKey

Numbers = npt.NDArray[np.uint32]
SEED_BYTES = 16
KEY_BYTES = 32
_DOMAIN = "fedcg/1 masked sum"


@dataclass(frozen=True)
class SumRound:
    """The sum of one round attempt; keys and signatures of another one do not fit it."""

    federation: str
    round: int
    attempt: int

    def label(self, purpose: str, *names: str) -> bytes:
        """Separates every use of a key, and of a signature, from all others."""
        return json.dumps([_DOMAIN, self.federation, self.round, self.attempt, purpose, *names]).encode()


@dataclass(frozen=True)
class Announcement:
    """What a device makes known of its secrets before a sum.

    Attributes:
        cipher, mask: X25519 public keys.
        mark: commits it to its own mask.
        weight: that its numbers will have.
        signature: by its message key.
    """

    device: str
    cipher: bytes
    mask: bytes
    mark: bytes
    weight: int
    signature: bytes = b""

    def check(self, at: SumRound, key: VerifyKey) -> None:
        """Check that the device of that message key announced this for this sum.

        Raises:
            MalformedError: a key of another length, or one that nobody can agree on a key with.
            SignatureError: it did not.
        """
        if {len(self.cipher), len(self.mask), len(self.mark)} != {KEY_BYTES}:
            raise MalformedError(f"{self.device}: a key for a masked sum has {KEY_BYTES} bytes")
        if not key.verifies(self.signature, self.signed(at)):
            raise SignatureError(f"{self.device}: its keys for a masked sum are not signed by its message key")
        trial = X25519PrivateKey.generate()
        try:
            for public in (self.cipher, self.mask):
                agreed(trial, public, b"")
        except MalformedError as error:
            raise MalformedError(f"{self.device}: {error}") from error

    def signed(self, at: SumRound) -> bytes:
        """The bytes that the signature is over."""
        return at.label("announce", self.device, self.cipher.hex(), self.mask.hex(), self.mark.hex(), str(self.weight))


@dataclass(frozen=True)
class SumSecrets:
    """A device's secrets for one sum, never used for a second one.

    Attributes:
        cipher: makes the key that shares are sealed with.
        mask: makes the key of the masks between two devices.
        own: makes the device's own mask.
    """

    device: str
    cipher: bytes
    mask: bytes
    own: bytes

    @staticmethod
    def draw(device: str) -> SumSecrets:
        """New ones from the operating system's randomness."""
        return SumSecrets(device, *(secrets.token_bytes(SEED_BYTES) for _ in range(3)))

    def announce(self, at: SumRound, weight: int, key: SigningKey) -> Announcement:
        """What others may know of them, signed."""
        publics = (public_of(private_key(at, self.cipher)), public_of(private_key(at, self.mask)))
        unsigned = Announcement(self.device, *publics, own_mark(at, self.device, self.own), weight)
        return Announcement(self.device, *publics, unsigned.mark, weight, key.sign(unsigned.signed(at)))


def private_key(at: SumRound, seed: bytes) -> X25519PrivateKey:
    """The X25519 key of a seed."""
    return X25519PrivateKey.from_private_bytes(_derived(seed, at.label("private key")))


def public_of(key: X25519PrivateKey) -> bytes:
    """Its public half, 32 bytes."""
    return key.public_key().public_bytes_raw()


def own_mark(at: SumRound, device: str, seed: bytes) -> bytes:
    """The commitment to a device's own mask."""
    return hashlib.sha256(at.label("own mark", device, seed.hex())).digest()


def agreed(private: X25519PrivateKey, public: bytes, label: bytes) -> bytes:
    """The key of 32 bytes that both sides of an X25519 exchange get for one use.

    Raises:
        MalformedError: a public key that no honest side has.
    """
    try:
        return _derived(private.exchange(X25519PublicKey.from_public_bytes(public)), label)
    except ValueError as error:
        raise MalformedError("a public key for a masked sum is none of X25519") from error


def own_mask(at: SumRound, device: str, seed: bytes, size: int) -> Numbers:
    """A device's own mask, [size] uint32."""
    return _stream(_derived(seed, at.label("own mask", device)), size)


def pair_mask(at: SumRound, private: X25519PrivateKey, device: str, other: Announcement, size: int) -> Numbers:
    """What `device` adds for the pair of it and another one, [size] uint32: what the other one subtracts."""
    first, second = sorted((device, other.device))
    mask = _stream(agreed(private, other.mask, at.label("pair mask", first, second)), size)
    return mask if device == first else np.zeros_like(mask) - mask


def _derived(material: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(material)


def _stream(key: bytes, size: int) -> Numbers:
    """`size` numbers of ChaCha20's key stream; each key has one."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


@dataclass(frozen=True)
class SealedPair:
    """Seals bytes from one device to another, once: the key belongs to one direction of one sum."""

    key: bytes
    label: bytes

    @staticmethod
    def between(at: SumRound, private: X25519PrivateKey, public: bytes, sender: str, recipient: str) -> SealedPair:
        """By either side: its own private key, the other's public one.

        Raises:
            MalformedError: a public key that no honest side has.
        """
        label = at.label("shares", sender, recipient)
        return SealedPair(agreed(private, public, label), label)

    def seal(self, content: bytes) -> bytes:
        """16 bytes longer."""
        return self._box.encrypt(bytes(12), content, self.label)

    def open(self, sealed: bytes) -> bytes:
        """The content.

        Raises:
            SumError: it was changed, or sealed for another use.
        """
        try:
            return self._box.decrypt(bytes(12), sealed, self.label)
        except InvalidTag as error:
            raise SumError("shares of a masked sum can't be opened: they were changed on the way") from error

    @cached_property
    def _box(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self.key)
