"""What this device keeps of the masked sum of a round attempt, on disk before anything of it is said: resends are byte-identical.

It signs and opens one list per round, whatever attempt: a repeated attempt has the same outputs, and differences of two sums would open
them. So a round of which this device gave shares out has no second sum here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from edge_client.errors import StoreError
from fedcg.wire.errors import SumError
from fedcg.wire.messages.signing import SigningKey, VerifyKey
from fedcg.wire.messages.sum_steps import (
    SumDealt,
    SumKeys,
    SumMembers,
    SumOpening,
    SumRevealed,
    SumShares,
    SumSigned,
    SumSurvivors,
)
from fedcg.wire.sums.protocol import Survivors, masked, reveal, share_out, sign_survivors
from fedcg.wire.sums.secrets import Numbers, SumRound, SumSecrets
from fedcg.wire.sums.steps import from_hex, in_hex, keys_of, members_of


class _Kept(BaseModel):
    """The record on disk, bytes in hex.

    Attributes:
        sealed: shares that this device dealt out; `dealt` those that it got.
        signed: the list that it signed.
        opened: the last round that it gave shares out for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    federation: str
    round: int
    attempt: int
    secrets: tuple[str, str, str]
    weight: int
    members: SumMembers | None = None
    sealed: dict[str, str] = {}
    dealt: dict[str, str] = {}
    signed: tuple[str, ...] | None = None
    opened: int = 0


class SumKeeper:
    """One device's part in the sums of its rounds.

    Args:
        device: its name.
        key: its message key.
        roster: message keys of the cohort's devices, from this device's owner.
        load, save: the record on disk; `save` returns once it is durable.
    """

    def __init__(
        self,
        device: str,
        key: SigningKey,
        roster: Callable[[], Mapping[str, VerifyKey]],
        load: Callable[[], bytes | None],
        save: Callable[[bytes], None],
    ) -> None:
        self._device, self._key, self._roster = device, key, roster
        self._load, self._save = load, save

    def announce(self, at: SumRound, weight: int) -> SumKeys | None:
        """This device's keys for the sum of an attempt; None where it opened a sum of that round before.

        Raises:
            StoreError: the record can't be read.
        """
        kept = self._read()
        if kept is not None and (kept.federation, kept.opened) == (at.federation, at.round):
            return None
        if kept is None or _at(kept) != at:
            drawn = SumSecrets.draw(self._device)
            seeds = (drawn.cipher.hex(), drawn.mask.hex(), drawn.own.hex())
            opened = 0 if kept is None or kept.federation != at.federation else kept.opened
            kept = _Kept(
                federation=at.federation,
                round=at.round,
                attempt=at.attempt,
                secrets=seeds,
                weight=weight,
                opened=opened,
            )
            self._write(kept)
        return keys_of(self._secrets(kept).announce(at, kept.weight, self._key))

    def members(self, at: SumRound, step: SumMembers) -> SumShares:
        """Deal out shares among the members.

        Raises:
            SumError: no announcement of this device is among them, one is not on the roster, or others were named before.
            SignatureError, MalformedError: as of `Announcement.check`.
        """
        kept = self._of(at)
        if kept.members is not None:
            if kept.members != step:
                raise SumError("the coordinator names other members of the sum than before")
            return SumShares(sealed=kept.sealed)
        secrets = self._secrets(kept)
        if step.announced.get(self._device) != keys_of(secrets.announce(at, kept.weight, self._key)):
            raise SumError("the members of the sum lack this device, or have other keys of it")
        members = members_of(at, step)
        members.check(self._roster())
        sealed = in_hex(share_out(secrets, members))
        self._write(kept.model_copy(update={"members": step, "sealed": sealed}))
        return SumShares(sealed=sealed)

    def dealt(self, at: SumRound, step: SumDealt) -> None:
        """Keep the shares of the peers, with whom this device masks.

        Raises:
            SumError: they are not of members, too few, or other ones than before.
        """
        kept = self._of(at)
        if kept.members is None or not step.sealed.keys() <= kept.members.announced.keys():
            raise SumError("shares of devices that are no members of the sum")
        if self._device not in step.sealed:
            raise SumError("this device's own shares were not passed on")
        if kept.dealt:
            if kept.dealt != step.sealed:
                raise SumError("the coordinator passes on other shares than before")
            return
        self._write(kept.model_copy(update={"dealt": dict(step.sealed)}))

    def peers(self, at: SumRound) -> tuple[str, ...]:
        """Those that this device masks with; empty where there is no sum."""
        kept = self._read()
        return tuple(sorted(kept.dealt)) if kept is not None and _at(kept) == at else ()

    def mask(self, at: SumRound, numbers: Numbers) -> Numbers:
        """Numbers behind this device's masks, the same at each call.

        Raises:
            SumError: there is no sum of this attempt here.
        """
        kept = self._of(at)
        if kept.members is None or not kept.dealt:
            raise SumError("no shares were dealt out for this attempt")
        return masked(self._secrets(kept), members_of(at, kept.members), kept.dealt, numbers)

    def survivors(self, at: SumRound, step: SumSurvivors) -> SumSigned:
        """Sign the list of survivors, one per attempt.

        Raises:
            SumError: it is not of this device's peers, lacks it, is too short, or another one than before.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or not set(names) <= kept.dealt.keys() or self._device not in names:
            raise SumError("the list of survivors is not of this sum's peers, or lacks this device")
        if len(names) < members_of(at, kept.members).threshold:
            raise SumError(f"{len(names)} survivors are too few")
        if kept.signed not in (None, names):
            raise SumError("the coordinator asks for a second list of survivors")
        self._write(kept.model_copy(update={"signed": names}))
        return SumSigned(signature=sign_survivors(at, sorted(kept.dealt), names, self._key).hex())

    def opening(self, at: SumRound, step: SumOpening) -> SumRevealed:
        """Give the shares out that open the sum of the list that this device signed.

        Raises:
            SumError: another list, too few signatures over it, or a sum of this round was opened before.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or kept.signed != names:
            raise SumError("the sum of another list of survivors than this device signed")
        survivors = Survivors(tuple(sorted(kept.dealt)), names, from_hex(step.signatures))
        members = members_of(at, kept.members)
        shares = reveal(self._secrets(kept), members, from_hex(kept.dealt), survivors, self._roster())
        self._write(kept.model_copy(update={"opened": at.round}))
        return SumRevealed(shares=in_hex(shares))

    def _secrets(self, kept: _Kept) -> SumSecrets:
        return SumSecrets(self._device, *(bytes.fromhex(seed) for seed in kept.secrets))

    def _of(self, at: SumRound) -> _Kept:
        kept = self._read()
        if kept is None or _at(kept) != at:
            raise SumError(f"this device announced no keys for the sum of round {at.round}, attempt {at.attempt}")
        return kept

    def _read(self) -> _Kept | None:
        content = self._load()
        try:
            return None if content is None else _Kept.model_validate_json(content)
        except ValidationError as error:
            raise StoreError(
                "the record of masked sums is damaged: this device takes part in none until it is deleted"
            ) from error

    def _write(self, kept: _Kept) -> None:
        if kept != self._read():
            self._save(kept.model_dump_json().encode())


def _at(kept: _Kept) -> SumRound:
    return SumRound(kept.federation, kept.round, kept.attempt)
