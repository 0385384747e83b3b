"""Sealed sums: sums of several devices' numbers, none of which can be read alone. Protocol of Bonawitz et al. (CCS 2017), active server.

This module has a device's secrets and announcements, and the steps of device and coordinator. Pairwise masks cancel in the sum, and the
coordinator removes the own masks. The result is still behind the cohort's masks (`cohort_mask`), which only holders of the cohort's secret
can remove. So the coordinator can read neither the numbers that it adds nor their sum.

Each device has three secrets of 16 bytes, for the key that seals shares, the key of its pairwise masks, and its own mask. 16 bytes are one
Shamir share over GF(2^128); X25519's 32 bytes are derived from them.

1. `SumSecrets.announce`: every device announces keys. Each device checks the others' keys against the keys for sums from its owner.
2. `share_out`: a device splits the seeds of its masks among all members, sealed for each.
3. `masked`: a device sends its numbers plus the cohort's mask, its own mask and one mask per other device, which that device subtracts.
4. `sign_survivors`: all sign one list of the devices whose masked numbers arrived, over one digest of all announcements (`Members.digest`).
5. `reveal`: given enough signatures over that list, a device reveals its share of a survivor's own mask or of a lost device's pair masks,
   never both.
6. `unmask`: with `threshold` shares of each mask the coordinator removes these masks from the sum. With one more, one share may be wrong.
7. `unsealed`: a device removes the cohort's masks of the survivors. The tags (`tagged`) show whether the sum was altered.

With a threshold above (n + 1) / 2 no two lists can both get enough signatures, even if one device and the coordinator collude. Each of the
n - 1 honest devices signs one list, and the dishonest device signs both. A coordinator that shows its devices different views of the members
gets signatures over different digests. Shares dealt in one view open in no other: `MIN_SUM_DEVICES` sign one view, or nothing opens.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedcg.values import Value
from fedcg.wire.errors import MalformedError, SignatureError, SumError
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.messages.schemas import SealedSum, SumExchange, SumKeys
from fedcg.wire.parts import MIN_SUM_DEVICES, TAGS, Part, PartLayouts
from fedcg.wire.sealed_numbers import Array, Numbers, added, clipped, from_numbers

SEED_BYTES = 16
KEY_BYTES = 32
_DOMAIN = "fedcg/1 sealed sum"


class SumRound(Value):
    """One sum of a round attempt; keys and signatures of another sum are not valid for it."""

    federation: str
    round: int
    attempt: int
    exchange: SumExchange = "parts"

    def label(self, purpose: str, *names: str) -> bytes:
        """Bytes that separate each use of a key or signature from all others."""
        return json.dumps([_DOMAIN, self.federation, self.round, self.attempt, self.exchange, purpose, *names]).encode()


def keys_label(at: SumRound, device: str, keys: SumKeys) -> bytes:
    """The bytes that a device signs when it announces its keys."""
    told = (keys.cipher.hex(), keys.mask.hex(), keys.mark.hex(), str(keys.weight), str(keys.vote))
    return at.label("announce", device, *told)


def check_keys(at: SumRound, device: str, keys: SumKeys, key: VerifyKey) -> None:
    """Check that the device with that key for sums announced these keys for this one.

    Raises:
        SignatureError: it did not.
        MalformedError: a public key that is not usable for X25519.
    """
    if not key.verifies(keys.signature, keys_label(at, device, keys)):
        raise SignatureError(f"{device}: its keys for a sealed sum are not signed by its key for sums")
    trial = X25519PrivateKey.generate()
    try:
        for public in (keys.cipher, keys.mask):
            agreed(trial, public, b"")
    except MalformedError as error:
        raise MalformedError(f"{device}: {error}") from error


class SumSecrets(Value):
    """A device's secrets for one sum, never used again.

    Attributes:
        cipher: seed of the key that seals shares.
        mask: seed of the key of the pairwise masks.
        own: seed of the device's own mask.
    """

    device: str
    cipher: bytes
    mask: bytes
    own: bytes

    @staticmethod
    def draw(device: str) -> SumSecrets:
        """New secrets from the operating system's randomness."""
        return SumSecrets(device, *(secrets.token_bytes(SEED_BYTES) for _ in range(3)))

    def announce(self, at: SumRound, weight: int, key: SigningKey, vote: int = 0) -> SumKeys:
        """The public part of the secrets, signed; `vote`: bits that all members see."""
        cipher, mask = (public_of(private_key(at, seed)) for seed in (self.cipher, self.mask))
        mark = own_mark(at, self.device, self.own)
        unsigned = SumKeys(cipher=cipher, mask=mask, mark=mark, weight=weight, vote=vote, signature=bytes(64))
        return unsigned.model_copy(update={"signature": key.sign(keys_label(at, self.device, unsigned))})


def private_key(at: SumRound, seed: bytes) -> X25519PrivateKey:
    """The X25519 key derived from a seed."""
    return X25519PrivateKey.from_private_bytes(_derived(seed, at.label("private key")))


def public_of(key: X25519PrivateKey) -> bytes:
    """The public half of a key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def own_mark(at: SumRound, device: str, seed: bytes) -> bytes:
    """The commitment to a device's own mask."""
    return hashlib.sha256(at.label("own mark", device, seed.hex())).digest()


def agreed(private: X25519PrivateKey, public: bytes, label: bytes) -> bytes:
    """The 32-byte key for one use that both sides of an X25519 exchange derive.

    Raises:
        MalformedError: a public key that no honest side has.
    """
    try:
        return _derived(private.exchange(X25519PublicKey.from_public_bytes(public)), label)
    except ValueError as error:
        raise MalformedError("a public key for a sealed sum is not a valid X25519 key") from error


def own_mask(at: SumRound, device: str, seed: bytes, size: int) -> Numbers:
    """A device's own mask, [size] uint32."""
    return _stream(_derived(seed, at.label("own mask", device)), size)


def cohort_mask(at: SumRound, secret: bytes, digest: str, device: str, size: int) -> Numbers:
    """A device's mask that only its cohort can remove, [size] uint32.

    Each device has its own. With one mask for all, n devices would add n times that mask, which would reveal the low bits of a sum.

    Args:
        at: the sum.
        secret: of the cohort.
        digest: of the announcements (`Members.digest`).
        device: its name.
        size: how many numbers.
    """
    return _stream(_derived(secret, at.label("cohort mask", digest, device)), size)


def pair_mask(at: SumRound, private: X25519PrivateKey, device: str, other: str, public: bytes, size: int) -> Numbers:
    """The mask that `device` adds for the pair with another device of that public key, [size] uint32; the other device subtracts it."""
    first, second = sorted((device, other))
    mask = _stream(agreed(private, public, at.label("pair mask", first, second)), size)
    return mask if device == first else np.zeros_like(mask) - mask


def _derived(material: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(material)


def _stream(key: bytes, size: int) -> Numbers:
    """`size` numbers of ChaCha20's key stream; each key is used for one stream."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


class SealedPair(Value):
    """Seals bytes from one device to another, once: the key belongs to one direction of one sum."""

    key: bytes
    label: bytes

    @staticmethod
    def between(members: Members, private: X25519PrivateKey, public: bytes, sender: str, recipient: str) -> SealedPair:
        """For either side of one view of the members: its own private key and the other's public key.

        Raises:
            MalformedError: a public key that no honest side has.
        """
        label = members.at.label("shares", members.digest, str(members.total), sender, recipient)
        return SealedPair(agreed(private, public, label), label)

    def seal(self, content: bytes) -> bytes:
        """The sealed content, 16 bytes longer."""
        return self._box.encrypt(bytes(12), content, self.label)

    def open(self, sealed: bytes) -> bytes:
        """The content.

        Raises:
            SumError: it was altered, or sealed for another use.
        """
        try:
            return self._box.decrypt(bytes(12), sealed, self.label)
        except InvalidTag as error:
            raise SumError("shares of a sealed sum can't be opened: they were altered in transit") from error

    @cached_property
    def _box(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self.key)


def threshold_of(devices: int) -> int:
    """The number of shares that open a mask: the smallest integer above (n + 1) / 2."""
    return (devices + 1) // 2 + 1


class Members(Value):
    """The members of a sum, by device, with their announcements; `total`: the sum of all weights that a device received.

    Devices with different totals can't open each other's shares. Otherwise a coordinator could let one device's numbers alone count.

    Raises:
        SumError: fewer than four members.
    """

    at: SumRound
    announced: Mapping[str, SumKeys]
    total: int = 0

    def __post_init__(self) -> None:
        if len(self.announced) < MIN_SUM_DEVICES:
            raise SumError(f"a sealed sum needs {MIN_SUM_DEVICES} devices, not {len(self.announced)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted. A device's position is the number of its shares."""
        return tuple(sorted(self.announced))

    @property
    def threshold(self) -> int:
        """The number of shares that open a mask."""
        return threshold_of(len(self.announced))

    @property
    def needed(self) -> int:
        """The number of devices that must be in the sum and must have signed its list."""
        return max(MIN_SUM_DEVICES, self.threshold)

    @cached_property
    def digest(self) -> str:
        """Digest of all announcements, in hex; different views of the members have different digests."""
        told = [keys_label(self.at, name, self.announced[name]).hex() for name in self.names]
        signed = [self.announced[name].signature.hex() for name in self.names]
        return hashlib.sha256(self.at.label("members", *told, *signed)).hexdigest()

    def share_of(self, device: str, peers: Iterable[str], total: int) -> float:
        """The share of a device's numbers in the mean, from the announced weights, `clipped` among those of its peers.

        Args:
            device: one of the peers.
            peers: the devices whose shares were dealt out in its group.
            total: the coordinator's sum of the weights in all groups; the peers' sum replaces a smaller value.
        """
        together = sum(self.announced[peer].weight for peer in peers)
        return clipped(self.announced[device].weight, together) / max(total, together)

    def check(self, roster: Mapping[str, VerifyKey]) -> None:
        """Check every announcement against the keys for sums from the device's owner, not from the coordinator.

        Raises:
            SumError: a device that is not on the roster.
            SignatureError, MalformedError: as for `check_keys`.
        """
        for name in self.names:
            if name not in roster:
                raise SumError(
                    f"{name} is not on this device's roster of the cohort: add the whole roster (`fedcg cohort roster FILE`)",
                    "roster",
                )
            check_keys(self.at, name, self.announced[name], roster[name])


def share_out(secrets: SumSecrets, members: Members) -> dict[str, bytes]:
    """The shares of a device's mask seeds, sealed for each member including itself. Each call draws new ones: keep them for resends."""
    count = len(members.names)
    shares = {
        name: b"".join(both)
        for name, both in zip(
            members.names,
            zip(*(_split(seed, members.threshold, count) for seed in (secrets.mask, secrets.own)), strict=True),
            strict=True,
        )
    }
    private = private_key(members.at, secrets.cipher)
    return {
        name: SealedPair.between(members, private, members.announced[name].cipher, secrets.device, name).seal(share)
        for name, share in shares.items()
    }


def _split(seed: bytes, threshold: int, count: int) -> list[bytes]:
    return [bytes(share) for _, share in Shamir.split(threshold, count, seed)]


def masked(
    secrets: SumSecrets, members: Members, peers: Iterable[str], numbers: Numbers, cohort_secret: bytes
) -> Numbers:
    """A device's numbers behind its masks.

    Args:
        secrets: of the device.
        members: the devices that announced keys.
        peers: the members whose shares arrived; the sum can be opened only if all devices have the same.
        numbers: [size] uint32.
        cohort_secret: of the device's cohort.

    Returns:
        [size] uint32, modulo 2^32.
    """
    at, private = members.at, private_key(members.at, secrets.mask)
    size, announced = len(numbers), {name: members.announced[name] for name in peers if name != secrets.device}
    pairs = [pair_mask(at, private, secrets.device, other, keys.mask, size) for other, keys in announced.items()]
    cohorts = cohort_mask(at, cohort_secret, members.digest, secrets.device, size)
    return added([numbers, cohorts, own_mask(at, secrets.device, secrets.own, size), *pairs])


def tagged(at: SumRound, secret: bytes, numbers: Numbers) -> Numbers:
    """Numbers with their tags in positions 1 to `TAGS`: sums of the numbers with random factors. Tags add up like the numbers.

    The factors are derived from the cohort's secret and are the same for all devices. Masks hide a sum but don't protect it: if someone
    without the secret adds to it, each tag stays correct with a probability of at most one half.

    Args:
        at: the sum.
        secret: of the cohort.
        numbers: [size] uint32, more than `TAGS`.
    """
    found: Numbers = numbers.copy()
    found[1 : TAGS + 1] = 0
    factors = (_stream(_derived(secret, at.label("tag", str(tag))), len(found)) for tag in range(TAGS))
    found[1 : TAGS + 1] = [np.sum(each * found, dtype=np.uint32) for each in factors]
    return found


def check_tags(at: SumRound, secret: bytes, numbers: Numbers) -> None:
    """Check that an unsealed sum is unaltered.

    Raises:
        SumError: it was altered, or is of another secret.
    """
    if not np.array_equal(tagged(at, secret, numbers), numbers):
        raise SumError(
            "a sealed sum is of another secret, or was altered in transit: a device that joined after `fedcg cohort renew` can't open earlier ones"
        )


def unsealed(total: Numbers, at: SumRound, digest: str, names: Iterable[str], cohort_secret: bytes) -> Numbers:
    """The sum without the cohort's masks, after the coordinator has removed all others, [size] uint32; with another secret it is noise.

    Args:
        total: [size] uint32.
        at: the sum.
        digest: of its announcements.
        names: the devices whose numbers are in it.
        cohort_secret: of the cohort.
    """
    return functools.reduce(
        np.subtract, (cohort_mask(at, cohort_secret, digest, name, len(total)) for name in sorted(names)), total
    )


def opened(
    sealed: Mapping[str, Numbers], groups: Sequence[SealedSum], federation: str, cohort_secret: bytes
) -> dict[Part, Numbers]:
    """The numbers of each part of a sum without the cohort's masks.

    Args:
        sealed: the numbers of an aggregate's part `sealed`.
        groups: the groups whose sums were added, all of the same parts and attempt; at least one.
        federation: its name.
        cohort_secret: of the cohort.

    Raises:
        SumError: as for `check_tags`.
    """
    parts, at = groups[0].parts, SumRound(federation, groups[0].round, groups[0].attempt)
    total = np.concatenate([sealed[part.value] for part in parts])
    for one in groups:
        total = unsealed(total, at, one.digest, one.names, cohort_secret)
    check_tags(at, cohort_secret, total)
    return dict(zip(parts, np.split(total, np.cumsum([len(sealed[part.value]) for part in parts])[:-1]), strict=True))


def opened_means(
    sealed: Mapping[str, Numbers],
    groups: Sequence[SealedSum],
    federation: str,
    cohort_secret: bytes,
    layouts: PartLayouts,
    most: float,
) -> dict[Part, dict[str, Array]]:
    """The means in the sums of one exchange, readable with the cohort's secret; arguments as for `opened` and `from_numbers`.

    Raises:
        SumError: it is of another secret, or was altered.
    """
    numbers = opened(sealed, groups, federation, cohort_secret)
    return {part: from_numbers(numbers[part], layouts[part], most) for part in groups[0].parts}


def survivors_label(members: Members, peers: Sequence[str], survivors: Sequence[str]) -> bytes:
    """The bytes that members sign before any share is revealed: a list for one view of the members."""
    return members.at.label("survivors", members.digest, *sorted(peers), "of whom came", *sorted(survivors))


def sign_survivors(members: Members, peers: Sequence[str], survivors: Sequence[str], key: SigningKey) -> bytes:
    """A device's signature that it will open the sum of exactly these devices."""
    return key.sign(survivors_label(members, peers, survivors))


class Survivors(Value):
    """The list of devices whose numbers are in the sum, with the members' signatures over it.

    Attributes:
        peers: the devices whose shares were dealt out.
        names: the devices whose masked numbers arrived.
        signatures: by device.
    """

    peers: tuple[str, ...]
    names: tuple[str, ...]
    signatures: Mapping[str, bytes]


def reveal(
    secrets: SumSecrets,
    members: Members,
    received: Mapping[str, bytes],
    survivors: Survivors,
    roster: Mapping[str, VerifyKey],
) -> dict[str, bytes]:
    """A device's shares that open the sum: of each survivor's own mask, and of each lost device's pair masks.

    The caller reveals them for one list per round, never for a second one.

    Args:
        secrets: of the device.
        members: the devices that announced keys.
        received: sealed shares, by the device that dealt them.
        survivors: the signed list.
        roster: keys for sums, from the device's owner.

    Returns:
        By peer, without those whose shares can't be opened: they were dealt wrong, or altered in transit.

    Raises:
        SumError: a list that this device must not open; names the problem.
    """
    peers, names = set(survivors.peers), set(survivors.names)
    if not names <= peers <= members.announced.keys() or secrets.device not in names:
        raise SumError("the list of survivors has devices that are not members of this sum, or lacks this device")
    if len(names) < members.needed:
        raise SumError(f"{len(names)} devices are too few to open a sum: {members.needed} are needed")
    if peers != received.keys():
        raise SumError("the list names other devices than those whose shares arrived")
    label = survivors_label(members, survivors.peers, survivors.names)
    signed = [
        name
        for name in names
        if name in survivors.signatures and name in roster and roster[name].verifies(survivors.signatures[name], label)
    ]
    if len(signed) < members.needed:
        raise SumError(f"{len(signed)} of {members.needed} required devices have signed the list of survivors")
    private, shares = private_key(members.at, secrets.cipher), dict[str, bytes]()
    for name in sorted(peers):
        pair = SealedPair.between(members, private, members.announced[name].cipher, name, secrets.device)
        with contextlib.suppress(SumError):
            share = pair.open(received[name])
            if len(share) == 2 * SEED_BYTES:
                shares[name] = share[SEED_BYTES:] if name in names else share[:SEED_BYTES]
    return shares


def unmask(
    total: Numbers, members: Members, survivors: Survivors, revealed: Mapping[str, Mapping[str, bytes]]
) -> Numbers:
    """The sum of the survivors' numbers.

    Args:
        total: [size] uint32, the sum of their masked numbers.
        members: the devices that announced keys.
        survivors: the devices whose numbers are in it.
        revealed: by device, the result of its `reveal`.

    Raises:
        SumError: too few shares, or shares that don't match the announcement; names the device of these masks.
    """
    at, size, given = members.at, len(total), dict(revealed)

    def seed_of(name: str, *, is_own: bool) -> bytes:
        seed, doubted = _recombined(name, members, given, is_own)
        given.pop(doubted, None)  # do not try its other shares first
        return seed

    for name in survivors.names:
        total = total - own_mask(at, name, seed_of(name, is_own=True), size)
    for name in sorted(set(survivors.peers) - set(survivors.names)):
        private = private_key(at, seed_of(name, is_own=False))
        for other in survivors.names:
            total = total + pair_mask(at, private, name, other, members.announced[other].mask, size)
    return total


def _recombined(
    name: str, members: Members, revealed: Mapping[str, Mapping[str, bytes]], is_own: bool
) -> tuple[bytes, str]:
    """The seed of a device's own mask or pair masks, and the holder of the one wrong share that had to be left out, or ""."""
    shares = [
        (holder, (number, revealed[holder][name]))
        for number, holder in enumerate(members.names, 1)
        if holder in revealed and name in revealed[holder]
    ]
    if len(shares) < members.threshold:
        raise SumError(f"{name}: {len(shares)} of {members.threshold} shares of its masks arrived")
    spare = shares[members.threshold :]
    for doubted in ("", *(holder for holder, _ in shares[: members.threshold] if spare)):
        believed = [share for holder, share in shares if holder != doubted]
        seed = bytes(Shamir.combine(believed[: members.threshold]))
        if _fits(seed, name, members, is_own):
            return seed, doubted
    kind = "own mask" if is_own else "pair masks"
    raise SumError(
        f"{name}: the shares of its {kind} don't match its announcement: it dealt wrong ones, or other devices sent wrong ones"
    )


def _fits(seed: bytes, name: str, members: Members, is_own: bool) -> bool:
    announced = members.announced[name]
    if is_own:
        return own_mark(members.at, name, seed) == announced.mark
    return public_of(private_key(members.at, seed)) == announced.mask
