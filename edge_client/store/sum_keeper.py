"""This device's record of a round attempt's sealed sum. It is saved before anything is sent, so resent messages are byte-identical.

A device's numbers of a round are in at most one sum, across all attempts. A repeated attempt would have nearly the same numbers, and the
difference of two sums would reveal them. So once a device's peers are known, no other attempt of that round has a sum on it.

If two rounds' sums have different lists of devices and the other devices' numbers have hardly changed, the difference reveals the numbers of
the devices that differ. Several lists can reveal a single device. So a device signs a different list only if its own numbers have moved, or if
the lists differ only by devices whose owners agreed to that. Then all lists have the same other devices, and a combination of sums without
these only reveals numbers of consenting devices.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from edge_client.errors import StoreError
from edge_client.store.private_store import NUMBERS_FILE, PrivateStore
from fedcg.values import Value
from fedcg.wire.errors import SumError
from fedcg.wire.messages import schemas
from fedcg.wire.parts import TAGS
from fedcg.wire.sealed_numbers import Numbers, clipped
from fedcg.wire.sums import (
    Members,
    SumRound,
    SumSecrets,
    Survivors,
    check_tags,
    masked,
    reveal,
    share_out,
    sign_survivors,
    tagged,
    unsealed,
)

MOST_LISTS = 64
SKETCH_NUMBERS = 256
LEAST_MOVE = 0.5
"""How far numbers must have moved before a different list is signed, relative to their distance to the last mean."""
LEAST_SHARE = 1 / 32768
"""Smallest share of a device in a sum. With less, a number has fewer than 12 bits, and sums of rounded numbers reveal single numbers."""

_CONSENT = (
    "Sums resume when training has moved the numbers, or in a new federation. Numbers of `analytic` never move: there, the owners of these devices "
    "have to agree to be seen individually (`fedcg cohort card --alone` on each, then the new roster on every device)"
)


class Numbered(BaseModel, frozen=True, extra="ignore"):
    """The training process's description of this device's numbers in an attempt. The store keeps it in a separate file.

    Attributes:
        sketch: random sums of the numbers, [SKETCH_NUMBERS]. Distances between sketches approximate distances between the numbers, within
            some hundredths.
        parts: the parts of the numbers.
        to_mean: distance of the numbers to the mean that the round started from, or to the cohort's initial weights before the first mean.
        digest: of the numbers, because the masks of one attempt must never hide different numbers.
    """

    round: int
    attempt: int
    parts: tuple[str, ...]
    sketch: tuple[float, ...]
    to_mean: float
    digest: str

    @staticmethod
    def of(
        at: SumRound, parts: tuple[str, ...], numbers: npt.NDArray[np.float64], mean: npt.NDArray[np.float64], seed: int
    ) -> "Numbered":
        """The description of the numbers [P] of some parts and the mean [P]. `seed` is this device's, the same in all rounds."""
        distance = float(np.linalg.norm(numbers - mean))
        stream = np.random.default_rng(seed)
        signs, places = stream.choice((-1.0, 1.0), len(numbers)), stream.integers(0, SKETCH_NUMBERS, len(numbers))
        sketch = np.bincount(places, signs * numbers, SKETCH_NUMBERS)
        told, digest = tuple(sketch.tolist()), hashlib.sha256(numbers.tobytes()).hexdigest()
        return Numbered(round=at.round, attempt=at.attempt, parts=parts, sketch=told, to_mean=distance, digest=digest)


class _List(BaseModel, frozen=True, extra="forbid"):
    """A list that this device signed, its own numbers in that sum, and their weight: `weight` images, `share` of all."""

    names: tuple[str, ...]
    parts: tuple[str, ...]
    sketch: tuple[float, ...]
    weight: float
    share: float


class _Kept(BaseModel, frozen=True, extra="forbid", ser_json_bytes="hex"):
    """The record on disk, bytes in hex.

    Attributes:
        count: this device's images. `total`: all devices' images, if known from a separate sum; otherwise weights are announced.
        voted: the highest round with a vote. Other attempts of that round, and earlier rounds, get the same vote. The coordinator chooses what
            is judged, thus many different answers would reveal information about this device's images.
        sealed: shares that this device dealt; `dealt`: shares that it received.
        opened: the opened sum of weights of each group, by group number, of `groups`.
        signed: the list that it signed.
        masked_until: the highest earlier round in whose sum this device's numbers may be.
        lists: the lists that it signed in earlier rounds, each once, with its latest numbers, newest last.
    """

    federation: str
    round: int
    attempt: int
    secrets: tuple[schemas.Hex, schemas.Hex, schemas.Hex]
    count: int
    total: int | None = None
    vote: int = 0
    voted: int = 0
    members: schemas.SumMembers | None = None
    sealed: dict[str, schemas.Hex] = {}
    dealt: dict[str, schemas.Hex] = {}
    signed: tuple[str, ...] | None = None
    opened: dict[int, int] = {}
    groups: int = 0
    masked_until: int = 0
    lists: tuple[_List, ...] = ()

    @property
    def last_masked(self) -> int:
        """The highest round in whose sum this device's numbers may be; 0 without any."""
        return max(self.masked_until, self.round) if self.dealt else self.masked_until


class SumKeeper:
    """One device's part in the sums of its rounds.

    Args:
        store: of the device: its key for sums, the cohort's secret and roster, and the record.
        device: its name.
        least: the owner's minimum number of devices in a sum.
        exchange: the kind of sums.
    """

    def __init__(self, store: PrivateStore, device: str, least: int, exchange: schemas.SumExchange) -> None:
        self._store, self._device, self._least, self._exchange = store, device, least, exchange
        self._key = store.sum_key()

    def announce(self, at: SumRound, count: int, vote: int = 0, total: int | None = None) -> schemas.SumKeys | None:
        """This device's keys for an attempt's sum; None if its numbers of this or a later round are in another attempt's sum.

        Raises:
            StoreError: the record can't be read.
        """
        kept = self._read()
        if kept is None or _at(kept, self._exchange) != at:
            before = None if kept is None or kept.federation != at.federation else kept
            masked_until = 0 if before is None else before.last_masked
            # A coordinator that returns to an earlier round, e.g. after a restore, gets no second sum of a round.
            if at.round <= masked_until:
                return None
            drawn = SumSecrets.draw(self._device)
            seeds = (drawn.cipher, drawn.mask, drawn.own)
            where = {"federation": at.federation, "round": at.round, "attempt": at.attempt}
            lists = () if before is None else before.lists
            if before is not None and at.round <= before.voted:
                vote = before.vote
            told: dict[str, Any] = {"count": count, "total": total, "vote": vote}
            told["voted"] = max(at.round, 0 if before is None else before.voted)
            kept = _Kept(**where, secrets=seeds, **told, masked_until=masked_until, lists=lists)
            self._write(kept)
        return self._announced(at, kept).model_copy(update={"key": self._key.public.raw})

    def _announced(self, at: SumRound, kept: _Kept) -> schemas.SumKeys:
        weight = kept.count if self._exchange == "parts" and kept.total is None else 1
        return SumSecrets(self._device, *kept.secrets).announce(at, weight, self._key, kept.vote)

    def members(self, at: SumRound, step: schemas.SumMembers) -> schemas.SumShares:
        """Deal shares to the members.

        Raises:
            SumError: this device's announcement is missing, a member is not on the roster, or the members differ from before.
            SignatureError, MalformedError: from `check_keys`.
        """
        kept = self._of(at)
        if kept.members is not None:
            if kept.members != step:
                raise SumError("the coordinator sent different members of the sum than before")
            return schemas.SumShares(sealed=kept.sealed)
        secrets = SumSecrets(self._device, *kept.secrets)
        if step.announced.get(self._device) != self._announced(at, kept):
            raise SumError("the members of the sum lack this device or have different keys for it")
        kept = kept.model_copy(update={"members": step})
        members = _members(kept, at)
        members.check(self._store.roster().keys)
        sealed = share_out(secrets, members)
        self._write(kept.model_copy(update={"sealed": sealed}))
        return schemas.SumShares(sealed=sealed)

    def dealt(self, at: SumRound, step: schemas.SumDealt) -> None:
        """Save the shares of the peers that this device shares masks with.

        Raises:
            SumError: shares are from non-members, too few, or differ from before.
        """
        kept = self._of(at)
        if kept.members is None or not step.sealed.keys() <= kept.members.announced.keys():
            raise SumError("shares from devices that are not members of the sum")
        if self._device not in step.sealed:
            raise SumError("this device's own shares are missing")
        if len(step.sealed) < (least := max(self._least, _members(kept, at).needed)):
            raise self._too_few(f"{len(step.sealed)} devices", least)
        if kept.dealt:
            if kept.dealt != step.sealed:
                raise SumError("the coordinator sent different shares than before")
            return
        kept = kept.model_copy(update={"dealt": dict(step.sealed)})
        if self._exchange == "parts" and _share(kept, self._device) < LEAST_SHARE:
            raise SumError(f"this device's share of the sum would be less than {LEAST_SHARE:.1e}")
        self._write(kept)

    def survivors(self, at: SumRound, step: schemas.SumSurvivors) -> schemas.SumSigned:
        """Sign the list of survivors, one per attempt.

        Raises:
            SumError: it has devices that are not peers, lacks this device, is too short or differs from the one signed before. Also if it
                differs from an earlier round's list although this device's numbers have hardly moved.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or not set(names) <= kept.dealt.keys() or self._device not in names:
            raise SumError("the list of survivors has devices that are not peers, or lacks this device")
        members = _members(kept, at)
        if len(names) < (least := max(self._least, members.needed)):
            raise self._too_few(f"{len(names)} survivors", least)
        if kept.signed not in (None, names):
            raise SumError("the coordinator asks for a second list of survivors")
        if kept.signed is None:
            lists = kept.lists if self._exchange == "weights" else self._with_list(at, kept, names)
            self._write(kept.model_copy(update={"signed": names, "lists": lists[-MOST_LISTS:]}))
        return schemas.SumSigned(signature=sign_survivors(members, sorted(kept.dealt), names, self._key))

    def _with_list(self, at: SumRound, kept: _Kept, names: tuple[str, ...]) -> tuple[_List, ...]:
        """The signed lists including this one, after checking that its numbers may be in this sum in addition to earlier ones."""
        try:
            own = Numbered.model_validate(self._store.record(NUMBERS_FILE))
        except ValidationError as error:
            raise SumError("this device's numbers of the round are unknown") from error
        if (own.round, own.attempt) != (at.round, at.attempt):
            raise SumError("this device has no numbers of the round")
        counts = {"weight": _weight(kept), "share": _share(kept, self._device)}
        new = _List(names=names, parts=own.parts, sketch=own.sketch, **counts)
        for earlier in (one for one in kept.lists if one.parts == own.parts):
            moved = float(np.linalg.norm(np.subtract(own.sketch, earlier.sketch)))
            if moved < LEAST_MOVE * own.to_mean and (problem := self._shown(earlier, new)):
                raise SumError(
                    f"{problem}, and this device's numbers have hardly moved since, so it skips the sum. {_CONSENT}",
                    "shown",
                )
        return (*(one for one in kept.lists if (one.names, one.parts) != (names, own.parts)), new)

    def _shown(self, earlier: _List, new: _List) -> str:
        """What the difference to an earlier sum would reveal but should not, if this device's numbers have not moved; empty if nothing."""
        alone = self._store.roster().alone
        unlike, others = set(earlier.names) ^ set(new.names), set(new.names) - alone
        if unlike - alone:
            return f"the sum would differ from an earlier one only by {' and '.join(sorted(unlike - alone))}"
        if unlike and 0 < len(others) < self._least:
            return f"sums of several lists would reveal the sum of {' and '.join(sorted(others))}, fewer than {self._least} devices"
        if earlier.weight != new.weight and self._device not in alone:
            return "this device, which has most images, would count for more or less than in an earlier sum"
        if not unlike and earlier.share != new.share and not alone & set(new.names):
            return "the same devices would count for more or less than in an earlier sum"
        return ""

    def _too_few(self, found: str, least: int) -> SumError:
        own = "; policy.least_sum in agent.toml: lower it, or wait for more devices" if least == self._least else ""
        return SumError(f"{found} are too few for a sum: {least} are needed here{own}", "least_sum" if own else "other")

    def opening(self, at: SumRound, step: schemas.SumOpening) -> schemas.SumRevealed:
        """Reveal the shares that open the sum of the signed list.

        Raises:
            SumError: another list, or too few signatures on it.
        """
        kept = self._of(at)
        names = tuple(sorted(step.names))
        if kept.members is None or kept.signed != names:
            raise SumError("the sum has a different list of survivors than this device signed")
        survivors = Survivors(tuple(sorted(kept.dealt)), names, step.signatures)
        secrets, members = SumSecrets(self._device, *kept.secrets), _members(kept, at)
        return schemas.SumRevealed(shares=reveal(secrets, members, kept.dealt, survivors, self._store.roster().keys))

    def number(self, at: SumRound) -> schemas.SumNumbers:
        """This device's masked count.

        Raises:
            SumError: no cohort secret, or no peers yet.
        """
        kept, secret = self._of(at), self._store.cohort_secret()
        if secret is None or kept.members is None:
            raise SumError("this device has no cohort secret or no peers")
        secrets, members = SumSecrets(self._device, *kept.secrets), _members(kept, at)
        count = tagged(at, secret, np.array([kept.count, *[0] * TAGS], np.uint32))
        behind = masked(secrets, members, kept.dealt, count, secret)
        return schemas.SumNumbers(numbers=behind.astype("<u4").tobytes())

    def opened(self, at: SumRound, step: schemas.SumOpened) -> None:
        """Save the sum of one group's counts.

        Raises:
            SumError: the sum is implausible, or the number of groups differs from before.
        """
        kept, secret = self._of(at), self._store.cohort_secret()
        if secret is None or step.group >= step.groups or kept.groups not in (0, step.groups):
            raise SumError("the groups of a sum of weights differ from before")
        if kept.members is not None and self._device not in step.names and kept.members.announced.keys() & step.names:
            raise SumError("a sum of weights lacks this device's: its share would exceed the total")
        numbers = np.frombuffer(step.numbers, "<u4").astype(np.uint32)
        numbers = unsealed(numbers, at, step.digest, step.names, secret)
        check_tags(at, secret, numbers)
        found = int(numbers[0])
        if not len(step.names) <= found < 1 << 31 or (self._device in step.names and found < kept.count):
            raise SumError("a sum of weights is impossible: another secret, or a device sent a wrong weight")
        self._write(kept.model_copy(update={"groups": step.groups, "opened": {**kept.opened, step.group: found}}))

    def found(self, at: SumRound) -> tuple[int, int, int] | None:
        """This device's count, the total count, and its vote; None before the sums of all groups are opened."""
        kept = self._read()
        if kept is None or _at(kept, self._exchange) != at or not kept.groups or len(kept.opened) < kept.groups:
            return None
        return kept.count, sum(kept.opened.values()), kept.vote

    def answer(
        self, at: SumRound, step: schemas.SumMembers | schemas.SumSurvivors | schemas.SumOpening
    ) -> schemas.SumShares | schemas.SumSigned | schemas.SumRevealed:
        """The answer to a step.

        Raises:
            SumError, SignatureError, MalformedError: from the step's method.
        """
        if isinstance(step, schemas.SumMembers):
            return self.members(at, step)
        return self.survivors(at, step) if isinstance(step, schemas.SumSurvivors) else self.opening(at, step)

    def _of(self, at: SumRound) -> _Kept:
        kept = self._read()
        if kept is None or _at(kept, self._exchange) != at:
            raise SumError(f"this device announced no keys for the sum of round {at.round}, attempt {at.attempt}")
        return kept

    def _read(self) -> _Kept | None:
        return _read(self._store.sum_record(self._exchange))

    def _write(self, kept: _Kept) -> None:
        if kept != self._read():
            self._store.save_sum_record(self._exchange, kept.model_dump(mode="json"))


class SumMasks(Value):
    """A device's part in the sum of an attempt.

    Attributes:
        share: weight of its numbers.
        votes: of all members, by device.
        changed: whether an earlier sum of the same parts had different devices.
        mask: masks numbers [size] uint32, with the same masks in each call.
    """

    share: float
    votes: Mapping[str, int]
    changed: bool
    mask: Callable[[Numbers], Numbers]


def masks_in(store: PrivateStore, device: str, at: SumRound, parts: tuple[str, ...]) -> SumMasks | None:
    """The masks in a device's record for the sum of some parts; None if it is not in a sum of that attempt or has no cohort secret.

    Raises:
        StoreError: the record can't be read.
    """
    kept, secret = _read(store.sum_record(at.exchange)), store.cohort_secret()
    if secret is None or kept is None or _at(kept, at.exchange) != at or kept.members is None or not kept.dealt:
        return None
    secrets, members, peers = SumSecrets(device, *kept.secrets), _members(kept, at), tuple(kept.dealt)
    votes = {name: keys.vote for name, keys in members.announced.items()}

    def mask(numbers: Numbers) -> Numbers:
        return masked(secrets, members, peers, tagged(at, secret, numbers), secret)

    changed = any(one.parts == parts and set(one.names) != set(peers) for one in kept.lists)
    return SumMasks(_share(kept, device), votes, changed, mask)


def _read(record: Mapping[str, Any]) -> _Kept | None:
    content = {name: value for name, value in record.items() if name != "format"}
    try:
        return _Kept.model_validate(content) if content else None
    except ValidationError as error:
        raise StoreError(
            "the record of sealed sums is damaged: this device joins no sums until the file is deleted"
        ) from error


def _members(kept: _Kept, at: SumRound) -> Members:
    """The members of the record's sum, with the total of all weights known to this device."""
    assert kept.members is not None
    return Members(at, kept.members.announced, kept.members.total if kept.total is None else kept.total)


def _share(kept: _Kept, device: str) -> float:
    """The share of a device's numbers among its peers, in [0, 1]."""
    if kept.total is not None:
        return clipped(kept.count, kept.total) / kept.total
    assert kept.members is not None
    return _members(kept, _at(kept, "parts")).share_of(device, kept.dealt, kept.members.total)


def _weight(kept: _Kept) -> float:
    """This device's weight in the sum: its image count, clipped if it is too large."""
    announced = {} if kept.members is None else kept.members.announced
    return clipped(kept.count, kept.total or sum(announced[name].weight for name in kept.dealt))


def _at(kept: _Kept, exchange: schemas.SumExchange) -> SumRound:
    return SumRound(kept.federation, kept.round, kept.attempt, exchange)
