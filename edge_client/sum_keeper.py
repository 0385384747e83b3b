"""This device's record of the masked sum of a round attempt, on disk before anything of it is sent: resends are byte-identical.

A device's numbers of a round are in one sum at most, whatever attempt. A repeated attempt would have much the same outputs, and
differences of two sums would open them. So once its peers are known, no other attempt of that round has a sum here.
It knows no store: the functions that load and save are given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from edge_client.errors import StoreError
from fedcg.wire.errors import SumError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.sums import (
    MIN_DEVICES,
    Members,
    Numbers,
    SumRound,
    SumSecrets,
    Survivors,
    masked,
    reveal,
    share_out,
    sign_survivors,
)


class _Kept(BaseModel):
    """The record on disk, bytes in hex.

    Attributes:
        sealed: shares that this device dealt out; `dealt` those that it got.
        signed: the list that it signed.
        masked_until: the highest round before this one in whose sum this device's numbers may be.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="hex")

    federation: str
    round: int
    attempt: int
    secrets: tuple[schemas.Hex, schemas.Hex, schemas.Hex]
    weight: int
    members: schemas.SumMembers | None = None
    sealed: dict[str, schemas.Hex] = {}
    dealt: dict[str, schemas.Hex] = {}
    signed: tuple[str, ...] | None = None
    masked_until: int = 0

    @property
    def last_masked(self) -> int:
        """The highest round in whose sum this device's numbers may be, 0 if there is none."""
        return max(self.masked_until, self.round) if self.dealt else self.masked_until


class SumKeeper:
    """One device's part in the sums of its rounds.

    Args:
        device: its name.
        key: its message key.
        roster: message keys of the cohort's devices, from this device's owner.
        load, save: the record on disk, empty before the first sum; `save` returns once it is durable.
    """

    def __init__(
        self,
        device: str,
        key: SigningKey,
        roster: Callable[[], Mapping[str, VerifyKey]],
        load: Callable[[], Mapping[str, Any]],
        save: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._device, self._key, self._roster = device, key, roster
        self._load, self._save = load, save

    def announce(self, at: SumRound, weight: int) -> schemas.SumKeys | None:
        """This device's keys for the sum of an attempt; None where its numbers of that round, or of a later one, are in another one's.

        Raises:
            StoreError: the record can't be read.
        """
        kept = self._read()
        if kept is None or _at(kept) != at:
            masked_until = 0 if kept is None or kept.federation != at.federation else kept.last_masked
            # A coordinator that goes back, as from a backup, gets no second sum of a round.
            if at.round <= masked_until:
                return None
            drawn = SumSecrets.draw(self._device)
            seeds = (drawn.cipher, drawn.mask, drawn.own)
            where = {"federation": at.federation, "round": at.round, "attempt": at.attempt}
            kept = _Kept(**where, secrets=seeds, weight=weight, masked_until=masked_until)
            self._write(kept)
        return SumSecrets(self._device, *kept.secrets).announce(at, kept.weight, self._key)

    def members(self, at: SumRound, step: schemas.SumMembers) -> schemas.SumShares:
        """Deal out shares among the members.

        Raises:
            SumError: no announcement of this device is among them, one is not on the roster, or others were named before.
            SignatureError, MalformedError: as of `check_keys`.
        """
        kept = self._of(at)
        if kept.members is not None:
            if kept.members != step:
                raise SumError("the coordinator names other members of the sum than before")
            return schemas.SumShares(sealed=kept.sealed)
        secrets = SumSecrets(self._device, *kept.secrets)
        if step.announced.get(self._device) != secrets.announce(at, kept.weight, self._key):
            raise SumError("the members of the sum lack this device, or have other keys of it")
        members = Members(at, step.announced)
        members.check(self._roster())
        sealed = share_out(secrets, members)
        self._write(kept.model_copy(update={"members": step, "sealed": sealed}))
        return schemas.SumShares(sealed=sealed)

    def dealt(self, at: SumRound, step: schemas.SumDealt) -> None:
        """Keep the shares of the peers, with whom this device masks.

        Raises:
            SumError: they are not of members, too few, or other ones than before.
        """
        kept = self._of(at)
        if kept.members is None or not step.sealed.keys() <= kept.members.announced.keys():
            raise SumError("shares of devices that are no members of the sum")
        if self._device not in step.sealed:
            raise SumError("this device's own shares were not passed on")
        if len(step.sealed) < max(MIN_DEVICES, Members(at, kept.members.announced).threshold):
            raise SumError(f"{len(step.sealed)} devices are too few for a sum")
        if kept.dealt:
            if kept.dealt != step.sealed:
                raise SumError("the coordinator passes on other shares than before")
            return
        self._write(kept.model_copy(update={"dealt": dict(step.sealed)}))

    def survivors(self, at: SumRound, step: schemas.SumSurvivors) -> schemas.SumSigned:
        """Sign the list of survivors, one per attempt.

        Raises:
            SumError: it is not of this device's peers, lacks it, is too short, or another one than before.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or not set(names) <= kept.dealt.keys() or self._device not in names:
            raise SumError("the list of survivors is not of this sum's peers, or lacks this device")
        if len(names) < Members(at, kept.members.announced).threshold:
            raise SumError(f"{len(names)} survivors are too few")
        if kept.signed not in (None, names):
            raise SumError("the coordinator asks for a second list of survivors")
        self._write(kept.model_copy(update={"signed": names}))
        return schemas.SumSigned(signature=sign_survivors(at, sorted(kept.dealt), names, self._key))

    def opening(self, at: SumRound, step: schemas.SumOpening) -> schemas.SumRevealed:
        """Give the shares out that open the sum of the list that this device signed.

        Raises:
            SumError: another list, or too few signatures over it.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or kept.signed != names:
            raise SumError("the sum of another list of survivors than this device signed")
        survivors = Survivors(tuple(sorted(kept.dealt)), names, step.signatures)
        secrets, members = SumSecrets(self._device, *kept.secrets), Members(at, kept.members.announced)
        return schemas.SumRevealed(shares=reveal(secrets, members, kept.dealt, survivors, self._roster()))

    def answer(
        self, at: SumRound, step: schemas.SumMembers | schemas.SumSurvivors | schemas.SumOpening
    ) -> schemas.SumShares | schemas.SumSigned | schemas.SumRevealed:
        """The answer to a step that asks for one.

        Raises:
            SumError, SignatureError, MalformedError: as of the step's own method.
        """
        if isinstance(step, schemas.SumMembers):
            return self.members(at, step)
        return self.survivors(at, step) if isinstance(step, schemas.SumSurvivors) else self.opening(at, step)

    def _of(self, at: SumRound) -> _Kept:
        kept = self._read()
        if kept is None or _at(kept) != at:
            raise SumError(f"this device announced no keys for the sum of round {at.round}, attempt {at.attempt}")
        return kept

    def _read(self) -> _Kept | None:
        return _read(self._load())

    def _write(self, kept: _Kept) -> None:
        if kept != self._read():
            self._save(kept.model_dump(mode="json"))


@dataclass(frozen=True)
class SumMasks:
    """A device's masks in the sum of an attempt.

    Attributes:
        weight: that it announced for its numbers.
        mask: numbers [size] uint32 behind them, the same at each call.
    """

    weight: int
    mask: Callable[[Numbers], Numbers]


def masks_in(record: Mapping[str, Any], device: str, at: SumRound) -> SumMasks | None:
    """The masks in a device's record; None where it has no part in a sum of that attempt.

    Raises:
        StoreError: the record can't be read.
    """
    kept = _read(record)
    if kept is None or _at(kept) != at or kept.members is None or not kept.dealt:
        return None
    secrets, members, peers = SumSecrets(device, *kept.secrets), Members(at, kept.members.announced), tuple(kept.dealt)
    return SumMasks(kept.weight, lambda numbers: masked(secrets, members, peers, numbers))


def _read(record: Mapping[str, Any]) -> _Kept | None:
    content = {name: value for name, value in record.items() if name != "format"}
    try:
        return _Kept.model_validate(content) if content else None
    except ValidationError as error:
        raise StoreError(
            "the record of masked sums is damaged: this device takes part in none until it is deleted"
        ) from error


def _at(kept: _Kept) -> SumRound:
    return SumRound(kept.federation, kept.round, kept.attempt)
