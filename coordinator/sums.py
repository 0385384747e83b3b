"""Sealed sums of round attempts, on the coordinator's side: it adds numbers that it can't read.

`SumBoard`, pure except for keys, collects the devices' steps and returns the next messages. `SealedSums` stores the board of the open attempt in the
database before sending anything, and opens the sum before the merge. Neither decides about the round: if too few devices answer in time, the round continues without a sum.
"""

import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

import numpy as np
from pydantic import BaseModel, TypeAdapter

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.storage.store import Store
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.errors import MalformedError, SignatureError, SumError, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import VerifyKey
from fedcg.wire.parts import MAX_SUM_DEVICES, MIN_SUM_DEVICES, TAGS
from fedcg.wire.sealed_numbers import Numbers, added, number_count
from fedcg.wire.sums import Members, SumRound, Survivors, check_keys, survivors_label, unmask

KEYS_WAIT_S = 60.0
"""How long to wait for keys after the first device's: some devices load their images first."""
WAIT_S = 15.0
"""How long any other step waits for missing answers."""
REPEAT_S = 4.0
"""Time after which a step is sent again to devices without an answer, in case their link was lost."""
Sends = list[tuple[str, schemas.ToDevice]]


class Phase(str, Enum):
    """What the sum is waiting for."""

    KEYS = "keys"
    SHARES = "shares"
    NUMBERS = "numbers"
    SIGNATURES = "signatures"
    OPENING = "opening"
    OPENED = "opened"
    OFF = "off"
    GROUPS = "groups"
    """Split into several sums, one per group of devices."""


_TIMED = (Phase.SHARES, Phase.SIGNATURES, Phase.OPENING)
_ENDED = (Phase.OPENED, Phase.OFF)


class SumRecord(BaseModel, extra="forbid", ser_json_bytes="hex"):
    """The complete state of a sum; bytes in hex.

    Attributes:
        awaited: devices that have not answered the last step.
        ended: the phase in which it was called off.
        signers: the signing keys for sums received with `keys`, by device.
        members: devices whose keys were passed on; `peers` those whose shares were dealt out; `survivors` those of them whose numbers arrived.
        told: each device's number in a sum of weights.
        refused: why devices do not participate, by device.
        groups: the sums of groups, if this one was split.
    """

    phase: Phase = Phase.KEYS
    reason: str = ""
    ended: Phase | None = None
    awaited: set[str] = set()
    keys: dict[str, schemas.SumKeys] = {}
    signers: dict[str, schemas.Hex] = {}
    members: schemas.SumMembers = schemas.SumMembers(announced={})
    sealed: dict[str, dict[str, schemas.Hex]] = {}
    peers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    signatures: dict[str, schemas.Hex] = {}
    shares: dict[str, dict[str, schemas.Hex]] = {}
    told: dict[str, schemas.Hex] = {}
    refused: dict[str, schemas.SumObstacle] = {}
    groups: list["SumRecord"] = []


class SumBoard:
    """One sum. More than `MAX_SUM_DEVICES` devices are split into random groups with one sum each.

    Args:
        at: the attempt.
        participants: the invited devices.
        record: state of the same attempt's board before a restart.

    Attributes:
        record: the complete state.
    """

    def __init__(self, at: SumRound, participants: Iterable[str], record: SumRecord | None = None) -> None:
        self.at = at
        self.record = SumRecord(awaited=set(participants)) if record is None else record
        self.groups = [SumBoard(at, (), group) for group in self.record.groups]
        self._until: float | None = None
        self._repeat_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether it advances with time."""
        return any(one.waits for one in self.groups) or self.record.phase in self._timed

    @property
    def phase(self) -> Phase:
        """What it is waiting for; with groups, the phase of the slowest one. Opened if one group is opened."""
        phases = {one.phase for one in self.groups} or {self.record.phase}
        waiting = phases - set(_ENDED)
        return next(iter(sorted(waiting, key=list(Phase).index)), Phase.OPENED if Phase.OPENED in phases else Phase.OFF)

    @property
    def ended(self) -> tuple[Phase | None, str]:
        """In which phase it was called off, and why; with groups, those of the first one."""
        return next((one.ended for one in self.groups), (self.record.ended, self.record.reason))

    @property
    def refused(self) -> dict[str, schemas.SumObstacle]:
        """Why devices do not participate, by device."""
        return {**self.record.refused, **{name: why for one in self.groups for name, why in one.refused.items()}}

    @property
    def opened(self) -> list["SumBoard"]:
        """The opened sums, one per group."""
        return [one for one in self.groups or [self] if one.phase is Phase.OPENED]

    @property
    def _timed(self) -> tuple[Phase, ...]:
        numbers = (Phase.NUMBERS,) if self._is_of_weights else ()  # otherwise they arrive with updates
        return (Phase.KEYS, *_TIMED, *numbers)

    @property
    def _is_of_weights(self) -> bool:
        return self.at.exchange == "weights"

    def _of(self, device: str) -> "SumBoard | None":
        """The group of a device."""
        return next((one for one in self.groups if device in one.record.members.announced), None)

    def check(self, device: str, step: schemas.FromDevice) -> None:
        """Check a step as the other devices will, so that one device can't spoil the sum for all.

        Only the devices know the cohort's keys for sums. Here, a device's key is the one received with its announcement.

        Args:
            device: the sender; steps of devices that are not awaited are not checked.
            step: keys, or a signature over the list of survivors; other steps need no check.

        Raises:
            SignatureError, MalformedError: with the device's name.
        """
        if (group := self._of(device)) is not None:
            group.check(device, step)
        kept = self.record
        if device not in kept.awaited:
            return
        if isinstance(step, schemas.SumKeys) and kept.phase is Phase.KEYS:
            if step.key is None:
                raise MalformedError(f"{device}: it announced keys for a sum without its signing key")
            check_keys(self.at, device, step, VerifyKey(step.key))
        if isinstance(step, schemas.SumSigned) and kept.phase is Phase.SIGNATURES:
            label = survivors_label(self.members, kept.peers, kept.survivors)
            if not VerifyKey(kept.signers[device]).verifies(step.signature, label):
                raise SignatureError(f"{device}: its signature does not match the list of survivors")

    def leave_out(self, device: str, now: float) -> Sends:
        """Stop waiting for a device after an invalid step."""
        if (group := self._of(device)) is not None:
            return group.leave_out(device, now)
        self.record.awaited.discard(device)
        is_last = self.waits and not self.record.awaited
        return [(device, schemas.SumOff()), *(self._next(now) if is_last else [])]

    def receive(self, device: str, step: schemas.FromDevice, now: float) -> Sends:
        """Handle a device's step. Unexpected steps are ignored; repeated or late keys are answered."""
        if (group := self._of(device)) is not None:
            return group.receive(device, step, now)
        kept = self.record
        if isinstance(step, schemas.SumKeys) and kept.phase is not Phase.KEYS:
            return self._again(device, step)
        if isinstance(step, schemas.SumRefused):
            kept.refused[device] = step.why
            is_last = kept.awaited == {device}
            kept.awaited.discard(device)
            return self._next(now) if is_last else []
        if device not in kept.awaited:
            return []
        if isinstance(step, schemas.SumKeys):
            assert step.key is not None
            kept.keys[device], kept.signers[device] = step.model_copy(update={"key": None}), step.key
        elif isinstance(step, schemas.SumShares) and kept.phase is Phase.SHARES:
            if step.sealed.keys() != kept.members.announced.keys():
                return []
            kept.sealed[device] = step.sealed
        elif isinstance(step, schemas.SumNumbers) and kept.phase is Phase.NUMBERS:
            kept.told[device] = step.numbers
        elif isinstance(step, schemas.SumSigned) and kept.phase is Phase.SIGNATURES:
            kept.signatures[device] = step.signature
        elif isinstance(step, schemas.SumRevealed) and kept.phase is Phase.OPENING:
            if not step.shares.keys() <= set(kept.peers):
                return []
            kept.shares[device] = step.shares
        else:
            return []
        kept.awaited.discard(device)
        return [] if kept.awaited else self._next(now)

    def tick(self, there: Collection[str], now: float) -> Sends:
        """Advance the time.

        Args:
            there: devices that may still participate in the attempt; its first two steps wait only for these.
            now: seconds, by any clock.
        """
        if self.groups:
            return [send for one in self.groups if one.waits for send in one.tick(there, now)]
        kept = self.record
        if kept.phase in (Phase.KEYS, Phase.SHARES):
            kept.awaited &= set(there)
        if self._until is None and self.waits and kept.keys:  # the first keys, or a restart
            self._until, self._repeat_at = now + (KEYS_WAIT_S if kept.phase is Phase.KEYS else WAIT_S), now
        is_over = self._until is not None and now >= self._until
        if self.waits and (is_over or not kept.awaited):
            return self._next(now)
        if kept.phase is Phase.KEYS or kept.phase not in self._timed or now < self._repeat_at:
            return []
        self._repeat_at = now + REPEAT_S
        return [(device, self._asked_of(device)) for device in sorted(kept.awaited)]

    def wait_anew(self) -> None:
        """Restart the wait at the next tick, after devices could not answer for a while."""
        self._until = None
        for one in self.groups:
            one.wait_anew()

    def close(self, accepted: Iterable[str], now: float) -> Sends:
        """Close the sum for the attempt's accepted updates: request signatures over the list of those with sealed numbers.

        The list does not change in later calls.
        """
        if self.groups:
            return [send for one in self.groups for send in one.close(accepted, now)]
        kept = self.record
        if kept.phase in (Phase.KEYS, Phase.SHARES):
            return self._off(f"the attempt was closed while waiting for {kept.phase.value}")
        if kept.phase is not Phase.NUMBERS:
            return []
        kept.survivors = tuple(sorted(set(accepted) & set(kept.peers)))
        if len(kept.survivors) < self.members.needed:
            return self._off(f"{len(kept.survivors)} of {self.members.needed} required sealed updates arrived")
        return self.ask(Phase.SIGNATURES, kept.survivors, now)

    def correction(self, size: int) -> Numbers:
        """The correction to add, modulo 2^32, to the sum of the survivors' sealed numbers, [size] uint32.

        Raises:
            SumError: it is not opened, or shares do not match the announcements; names the device.
        """
        if self.groups:
            return added([np.zeros(size, np.uint32), *(one.correction(size) for one in self.opened)])
        kept = self.record
        if kept.phase is not Phase.OPENED:
            raise SumError(f"the sum waits for {kept.phase.value}")
        survivors = Survivors(kept.peers, kept.survivors, kept.signatures)
        return unmask(np.zeros(size, np.uint32), self.members, survivors, kept.shares)

    @property
    def named(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """For each opened group, the digest of its members' announcements and the devices whose numbers are in it."""
        return tuple((one.members.digest, one.record.survivors) for one in self.opened)

    def weights(self) -> list[schemas.SumOpened]:
        """For a sum of weights, the sum of each group, for holders of the cohort's secret.

        Raises:
            SumError: as `correction`.
        """
        found = []
        for number, one in enumerate(self.opened):
            told = [np.frombuffer(one.record.told[device], "<u4").astype(np.uint32) for device in one.record.survivors]
            numbers = added([one.correction(1 + TAGS), *told]).astype("<u4").tobytes()
            about = {"digest": one.members.digest, "names": one.record.survivors}
            found.append(schemas.SumOpened(group=number, groups=len(self.opened), numbers=numbers, **about))
        return found

    @property
    def members(self) -> Members:
        """The members and their announcements."""
        return Members(self.at, self.record.members.announced)

    def _asked_of(self, device: str) -> schemas.ToDevice:
        """The last message sent to an awaited device."""
        kept = self.record
        if kept.phase is Phase.SHARES:
            return kept.members
        if kept.phase is Phase.NUMBERS:
            return self._dealt_to(device)
        if kept.phase is Phase.SIGNATURES:
            return schemas.SumSurvivors(names=kept.survivors)
        return schemas.SumOpening(names=kept.survivors, signatures=kept.signatures)

    def _next(self, now: float) -> Sends:
        kept = self.record
        if kept.phase is Phase.KEYS:
            return self._begin(now)
        if kept.phase is Phase.SHARES:
            return self._deal(now)
        if kept.phase is Phase.NUMBERS:
            return self.close(kept.told, now)
        signs = kept.phase is Phase.SIGNATURES
        answers, done = (kept.signatures, "signed the list") if signs else (kept.shares, "gave shares")
        needed = self.members.needed if signs else self.members.threshold
        if len(answers) < needed:
            return self._off(f"{len(answers)} of {needed} devices {done}")
        if kept.phase is Phase.SIGNATURES:
            return self.ask(Phase.OPENING, kept.survivors, now)
        kept.phase, kept.awaited = Phase.OPENED, set()
        return []

    def _begin(self, now: float) -> Sends:
        kept = self.record
        if len(kept.keys) < MIN_SUM_DEVICES:
            return self._off(f"{len(kept.keys)} of {MIN_SUM_DEVICES} required devices announced keys")
        total, drawn = sum(keys.weight for keys in kept.keys.values()), groups_of(kept.keys)
        if len(drawn) == 1:
            kept.members = schemas.SumMembers(announced=kept.keys, total=total)
            return self.ask(Phase.SHARES, sorted(kept.keys), now)
        kept.phase, kept.awaited = Phase.GROUPS, set()
        kept.groups = [
            SumRecord(
                phase=Phase.SHARES,
                keys=(keys := {device: kept.keys[device] for device in names}),
                signers={device: kept.signers[device] for device in names},
                members=schemas.SumMembers(announced=keys, total=total),
            )
            for names in drawn
        ]
        self.groups = [SumBoard(self.at, (), group) for group in kept.groups]
        return [send for one in self.groups for send in one.ask(Phase.SHARES, sorted(one.record.keys), now)]

    def _deal(self, now: float) -> Sends:
        kept = self.record
        kept.peers = tuple(sorted(kept.sealed))
        if len(kept.peers) < self.members.needed:
            return self._off(f"{len(kept.peers)} of {self.members.needed} required devices dealt out shares")
        others = [(device, schemas.SumOff()) for device in kept.members.announced if device not in kept.peers]
        dealt = self.ask(Phase.NUMBERS, kept.peers, now)
        if not self._is_of_weights:
            kept.awaited = set()
        return [*dealt, *others]

    def _dealt_to(self, device: str) -> schemas.SumDealt:
        return schemas.SumDealt(sealed={peer: self.record.sealed[peer][device] for peer in self.record.peers})

    def ask(self, phase: Phase, devices: Collection[str], now: float) -> Sends:
        """Start a phase and wait for these devices."""
        self.record.phase, self.record.awaited = phase, set(devices)
        self._until, self._repeat_at = now + WAIT_S, now + REPEAT_S
        return [(device, self._asked_of(device)) for device in devices]

    def _off(self, reason: str) -> Sends:
        kept = self.record
        kept.phase, kept.reason, kept.ended, kept.awaited = Phase.OFF, reason, kept.phase, set()
        return [(device, schemas.SumOff()) for device in sorted(kept.keys)]

    def _again(self, device: str, keys: schemas.SumKeys) -> Sends:
        """The messages missed by a device that announces its keys again or too late."""
        kept = self.record
        if kept.phase is Phase.OFF or kept.members.announced.get(device) != keys.model_copy(update={"key": None}):
            return [(device, schemas.SumOff())]
        if kept.phase is Phase.SHARES:
            return [(device, kept.members)] if device in kept.awaited else []
        return [(device, self._dealt_to(device) if device in kept.peers else schemas.SumOff())]


def groups_of(devices: Iterable[str]) -> list[list[str]]:
    """Split devices into random groups of at most `MAX_SUM_DEVICES`: as few and as equal as possible, each sorted."""
    drawn = sorted(devices)
    secrets.SystemRandom().shuffle(drawn)
    count = -(-len(drawn) // MAX_SUM_DEVICES)
    return [sorted(drawn[number::count]) for number in range(count)]


Merge = Callable[[OpenedSum], None]


_RECORDS = TypeAdapter(dict[schemas.SumExchange, SumRecord])


class SumFailure(Value):
    """Why a round continued without its sum; `ended`: what the sum was waiting for, None if it had all answers."""

    round: int
    reason: str
    ended: Phase | None


@dataclass(eq=False)
class SealedSums:
    """The sums of one federation, one attempt after another.

    Args:
        spec: the federation's spec; without sealed parts there are no sums, and all calls do nothing.
        store: the database.
        publisher: sends the steps.
        events: the event log.
        clock: seconds.
        is_member: whether a device may still participate.

    Attributes:
        failure: failure of the last sum, if it was not opened or is in no aggregate; kept in memory only.
        refused: why devices did not participate in it, by device; kept in memory only.
    """

    spec: FederationSpec
    store: Store
    publisher: Publisher
    events: EventLog
    clock: Callable[[], float]
    is_member: Callable[[str], bool]
    failure: SumFailure | None = field(default=None, init=False)
    refused: dict[str, schemas.SumObstacle] = field(default_factory=dict, init=False)
    _boards: dict[schemas.SumExchange, SumBoard] = field(default_factory=dict, init=False)
    _at: schemas.RoundAttempt = field(default=schemas.NO_ATTEMPT, init=False)
    _merge: Merge | None = field(default=None, init=False)
    _stored: str | None = field(default=None, init=False)

    def begin(self, at: schemas.RoundAttempt, participants: Collection[str]) -> None:
        """Start the sum of an open attempt; after a restart, resume it."""
        self._boards, self._merge = {}, None
        if not self.spec.sealed_in(at.round):
            return
        self._at = at
        self._stored = self.store.sealed_sums.of(self.spec.federation, self._at)
        known = {} if self._stored is None else _RECORDS.validate_json(self._stored)
        for exchange in get_args(schemas.SumExchange):
            if exchange == "parts" or not self.spec.has_public_counts:
                where = SumRound(self.spec.federation, at.round, at.attempt, exchange)
                self._boards[exchange] = SumBoard(where, participants, known.get(exchange))

    def end(self) -> None:
        """End the sum of a failed attempt."""
        self._boards, self._merge = {}, None

    def receive(self, device: str, message: schemas.SumUp) -> None:
        """Handle a device's step; an invalid step excludes the device from the sum."""
        board = self._boards.get(message.exchange)
        if board is None or not self.is_member(device) or message.at != self._at:
            return
        if isinstance(message.body, schemas.SumRefused):
            self.events.write("sum_refused", **vars(self._at), client=device, reason=message.body.why.value)
        try:
            board.check(device, message.body)
        except WireError as error:
            self.events.write("sum_refused", **vars(self._at), client=device, reason=str(error))
            self._follow(board, board.leave_out(device, self.clock()))
        else:
            self._follow(board, board.receive(device, message.body, self.clock()))

    def link_is_back(self) -> None:
        """Restart the wait, since devices could not answer for a while."""
        for board in self._boards.values():
            board.wait_anew()

    def tick(self, there: Collection[str]) -> None:
        """Advance the time while the link is up; `there`: devices that may still participate in the attempt."""
        for board in self._boards.values():
            if board.waits:
                self._follow(board, board.tick(there, self.clock()))

    def open(self, accepted: Collection[str], merge: Merge) -> None:
        """Open the sum of these clients' sealed numbers, then call `merge`, with an empty sum if it can't be opened."""
        board = self._boards.get("parts")
        if board is None:
            merge(OpenedSum())
            return
        self._merge = merge
        self._follow(board, board.close(accepted, self.clock()))

    def lost(self, at: schemas.RoundAttempt, reason: str) -> None:
        """Record that an attempt's aggregate has no sum although it was opened."""
        self.failure = SumFailure(at.round, reason, None)
        self.events.write("sum_off", **vars(at), reason=reason)

    def _follow(self, board: SumBoard, sends: Sends) -> None:
        content = _RECORDS.dump_json({exchange: one.record for exchange, one in self._boards.items()}).decode()
        if content != self._stored:
            self.store.sealed_sums.keep(self.spec.federation, self._at, content)
            self._stored = content
        for device, step in sends:
            self.publisher.sum_step(device, self._at, board.at.exchange, step)
        if board.phase not in _ENDED:
            return
        if board.at.exchange == "weights":
            self._tell_weights(board)
        elif self._merge is not None:
            merge, self._merge = self._merge, None
            merge(self._opened(board))

    def _tell_weights(self, board: SumBoard) -> None:
        """Send the opened sum of weights, or its failure, to the devices that wait for it. Without it, there is no sum of parts."""
        known = self._boards["parts"].record.keys
        waiting = sorted(board.record.keys.keys() - known.keys())
        try:
            steps: list[schemas.ToDevice] = [*board.weights()] or [schemas.SumOff()]
        except WireError as error:  # a device lied about its shares
            self.events.write("sum_refused", **vars(self._at), client="", reason=str(error))
            steps = [schemas.SumOff()]
        counted = {name for _, names in board.named for name in names}
        for device in waiting:
            for step in steps if device in counted else [schemas.SumOff()]:
                self.publisher.sum_step(device, self._at, "weights", step)

    def _opened(self, board: SumBoard) -> OpenedSum:
        ended, reason = board.ended
        self.refused = {device: why for one in self._boards.values() for device, why in one.refused.items()}
        if board.phase is Phase.OPENED:
            try:
                parts = self.spec.sealed_in(self._at.round)
                correction = board.correction(sum(number_count(self.spec.layouts[part]) for part in parts))
            except WireError as error:  # a device lied about its shares
                reason = str(error)
            else:
                self.failure = None
                clients = sorted(name for _, names in board.named for name in names)
                self.events.write("sum_opened", **vars(self._at), clients=clients)
                return OpenedSum(board.named, correction.astype("<u4").tobytes())
        self.failure = SumFailure(self._at.round, reason, ended)
        self.events.write("sum_off", **vars(self._at), reason=reason)
        return OpenedSum()
