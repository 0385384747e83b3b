"""Between the steps of messages and the values of the protocol."""

from __future__ import annotations

from collections.abc import Mapping

from fedcg.wire.messages.sum_steps import SumKeys, SumMembers
from fedcg.wire.sums.protocol import Members
from fedcg.wire.sums.secrets import Announcement, SumRound


def keys_of(announced: Announcement) -> SumKeys:
    """An announcement as a message carries it."""
    return SumKeys(
        cipher=announced.cipher.hex(),
        mask=announced.mask.hex(),
        mark=announced.mark.hex(),
        weight=announced.weight,
        signature=announced.signature.hex(),
    )


def announcement_of(device: str, keys: SumKeys) -> Announcement:
    """The announcement in a message; checks nothing."""
    cipher, mask, mark, signature = map(bytes.fromhex, (keys.cipher, keys.mask, keys.mark, keys.signature))
    return Announcement(device, cipher, mask, mark, keys.weight, signature)


def members_of(at: SumRound, step: SumMembers) -> Members:
    """The members in a message; checks no signature.

    Raises:
        SumError: fewer than four.
    """
    return Members(at, {device: announcement_of(device, keys) for device, keys in step.announced.items()})


def in_hex(values: Mapping[str, bytes]) -> dict[str, str]:
    """Bytes by device as a message carries them."""
    return {name: value.hex() for name, value in values.items()}


def from_hex(values: Mapping[str, str]) -> dict[str, bytes]:
    """The bytes in a message, by device."""
    return {name: bytes.fromhex(value) for name, value in values.items()}
