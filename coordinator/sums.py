"""Sealed sums of round attempts, on the coordinator's side: it adds what it can't read.

`SumBoard`, pure but for keys, collects the devices' steps and says what to send next. `SealedSums` keeps the board of the open attempt in the
database before anything is sent, and opens the sum before the merge. Neither decides about the round: where too few answer in time there is no sum, and the round goes on without one.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from pydantic import BaseModel, ConfigDict

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.storage.store import Store
from fedcg.event_log import EventLog, EventValue
from fedcg.learning.spec import FederationSpec
from fedcg.wire.errors import MalformedError, SignatureError, SumError, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import VerifyKey
from fedcg.wire.sealed_numbers import number_count
from fedcg.wire.sums import Members, Numbers, SumRound, Survivors, check_keys, survivors_label, unmask

KEYS_WAIT_S = 60.0
"""How long devices may take for their keys after the first one's: some load their images meanwhile."""
WAIT_S = 15.0
"""How long any other step waits for those who have not answered."""
REPEAT_S = 4.0
"""After so long a step is sent again to those who have not answered: their link may have been lost."""
Sends = list[tuple[str, schemas.ToDevice]]


class Phase(str, Enum):
    """What the sum waits for."""

    KEYS = "keys"
    SHARES = "shares"
    NUMBERS = "numbers"
    SIGNATURES = "signatures"
    OPENING = "opening"
    OPENED = "opened"
    OFF = "off"


_TIMED = (Phase.SHARES, Phase.SIGNATURES, Phase.OPENING)


class SumRecord(BaseModel):
    """All that the sum knows; bytes in hex.

    Attributes:
        awaited: who has not answered the last step.
        ended: the phase in which it went off.
        signers: the keys for sums that came with `keys`, by device.
        members: whose keys were passed on; `peers` whose shares were dealt out; `survivors` those of them whose numbers came.
    """

    model_config = ConfigDict(extra="forbid", ser_json_bytes="hex")

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


class SumBoard:
    """One sum.

    Args:
        at: of the attempt.
        participants: those who were invited.
        content: of the same attempt's board before a restart.

    Attributes:
        record: all that it knows.
    """

    def __init__(self, at: SumRound, participants: Iterable[str], content: str | None = None) -> None:
        self.at = at
        self.record = (
            SumRecord(awaited=set(participants)) if content is None else SumRecord.model_validate_json(content)
        )
        self._until: float | None = None
        self._repeat_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether it goes on by itself as time does."""
        return self.record.phase in (Phase.KEYS, *_TIMED)

    @property
    def content(self) -> str:
        """For the same board after a restart."""
        return self.record.model_dump_json()

    def check(self, device: str, step: schemas.FromDevice) -> None:
        """Check what the other devices will check, so that one device can't cost all of them the sum.

        Only they know which keys for sums are the cohort's: here a device's is the one that came with what it announced.

        Args:
            device: whose step it is; one that is not waited for is not checked.
            step: keys, or a signature over the list of survivors; others need no check.

        Raises:
            SignatureError, MalformedError: with the device's name.
        """
        kept = self.record
        if device not in kept.awaited:
            return
        if isinstance(step, schemas.SumKeys) and kept.phase is Phase.KEYS:
            if step.key is None:
                raise MalformedError(f"{device}: it announced keys for a sum without the one that signs them")
            check_keys(self.at, device, step, VerifyKey(step.key))
        if isinstance(step, schemas.SumSigned) and kept.phase is Phase.SIGNATURES:
            label = survivors_label(self._members, kept.peers, kept.survivors)
            if not VerifyKey(kept.signers[device]).verifies(step.signature, label):
                raise SignatureError(f"{device}: its signature is not of the list of survivors")

    def leave_out(self, device: str, now: float) -> Sends:
        """Wait for a device no longer whose step is not as it must be."""
        self.record.awaited.discard(device)
        is_last = self.waits and not self.record.awaited
        return [(device, schemas.SumOff()), *(self._next(now) if is_last else [])]

    def receive(self, device: str, step: schemas.FromDevice, now: float) -> Sends:
        """Take a device's step; what is not waited for from it is passed over, and keys that come again or too late are answered."""
        kept = self.record
        if isinstance(step, schemas.SumKeys) and kept.phase is not Phase.KEYS:
            return self._again(device, step)
        if device not in kept.awaited:
            return []
        if isinstance(step, schemas.SumKeys):
            assert step.key is not None
            kept.keys[device], kept.signers[device] = step.model_copy(update={"key": None}), step.key
        elif isinstance(step, schemas.SumShares) and kept.phase is Phase.SHARES:
            if step.sealed.keys() != kept.members.announced.keys():
                return []
            kept.sealed[device] = step.sealed
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
        """Time went on.

        Args:
            there: who may still take part in the attempt; in its first two steps nobody else is waited for.
            now: seconds, of any clock.
        """
        kept = self.record
        if kept.phase in (Phase.KEYS, Phase.SHARES):
            kept.awaited &= set(there)
        if self._until is None and self.waits and kept.keys:  # the first keys, or a restart
            self._until, self._repeat_at = now + (KEYS_WAIT_S if kept.phase is Phase.KEYS else WAIT_S), now
        is_over = self._until is not None and now >= self._until
        if self.waits and (is_over or not kept.awaited):
            return self._next(now)
        if kept.phase not in _TIMED or now < self._repeat_at:
            return []
        self._repeat_at = now + REPEAT_S
        return [(device, self._asked) for device in sorted(kept.awaited)]

    def wait_anew(self) -> None:
        """Nobody could answer for a while: from the next tick on all have their time again."""
        self._until = None

    def close(self, accepted: Iterable[str], now: float) -> Sends:
        """The attempt's updates are these: ask for signatures over the list of those that hold sealed numbers.

        The list stays what it was, whatever is called later.
        """
        kept = self.record
        if kept.phase in (Phase.KEYS, Phase.SHARES):
            return self._off(f"the attempt was closed while it waited for {kept.phase.value}")
        if kept.phase is not Phase.NUMBERS:
            return []
        kept.survivors = tuple(sorted(set(accepted) & set(kept.peers)))
        if len(kept.survivors) < self._members.needed:
            return self._off(f"{len(kept.survivors)} of {self._members.needed} sealed updates came")
        return self._ask(Phase.SIGNATURES, kept.survivors, now)

    def correction(self, size: int) -> Numbers:
        """What is to be added, modulo 2^32, to the sum of the survivors' sealed numbers, [size] uint32.

        Raises:
            SumError: it is not opened, or shares do not fit what was announced; names the device.
        """
        kept = self.record
        if kept.phase is not Phase.OPENED:
            raise SumError(f"the sum waits for {kept.phase.value}")
        survivors = Survivors(kept.peers, kept.survivors, kept.signatures)
        return unmask(np.zeros(size, np.uint32), self._members, survivors, kept.shares)

    @property
    def digest(self) -> str:
        """Of the members' announcements."""
        return self._members.digest

    @property
    def _members(self) -> Members:
        return Members(self.at, self.record.members.announced)

    @property
    def _asked(self) -> schemas.ToDevice:
        """What the devices that are waited for were sent last."""
        kept = self.record
        if kept.phase is Phase.SHARES:
            return kept.members
        if kept.phase is Phase.SIGNATURES:
            return schemas.SumSurvivors(names=kept.survivors)
        return schemas.SumOpening(names=kept.survivors, signatures=kept.signatures)

    def _next(self, now: float) -> Sends:
        kept = self.record
        if kept.phase is Phase.KEYS:
            return self._begin(now)
        if kept.phase is Phase.SHARES:
            return self._deal()
        signs = kept.phase is Phase.SIGNATURES
        answers, done = (kept.signatures, "signed the list") if signs else (kept.shares, "gave shares")
        needed = self._members.needed if signs else self._members.threshold
        if len(answers) < needed:
            return self._off(f"{len(answers)} of {needed} devices {done}")
        if kept.phase is Phase.SIGNATURES:
            return self._ask(Phase.OPENING, kept.survivors, now)
        kept.phase, kept.awaited = Phase.OPENED, set()
        return []

    def _begin(self, now: float) -> Sends:
        kept = self.record
        chosen = sorted(kept.keys)[: schemas.MAX_SUM_DEVICES]
        if len(chosen) < schemas.MIN_SUM_DEVICES:
            return self._off(f"{len(chosen)} of {schemas.MIN_SUM_DEVICES} devices announced keys")
        kept.members = schemas.SumMembers(announced={device: kept.keys[device] for device in chosen})
        left = [(device, schemas.SumOff()) for device in sorted(kept.keys.keys() - set(chosen))]
        return [*self._ask(Phase.SHARES, chosen, now), *left]

    def _deal(self) -> Sends:
        kept = self.record
        kept.peers = tuple(sorted(kept.sealed))
        if len(kept.peers) < self._members.needed:
            return self._off(f"{len(kept.peers)} of {self._members.needed} devices dealt out shares")
        kept.phase, kept.awaited = Phase.NUMBERS, set()
        others = [(device, schemas.SumOff()) for device in kept.members.announced if device not in kept.peers]
        return [*((device, self._dealt_to(device)) for device in kept.peers), *others]

    def _dealt_to(self, device: str) -> schemas.SumDealt:
        return schemas.SumDealt(sealed={peer: self.record.sealed[peer][device] for peer in self.record.peers})

    def _ask(self, phase: Phase, devices: Collection[str], now: float) -> Sends:
        self.record.phase, self.record.awaited = phase, set(devices)
        self._until, self._repeat_at = now + WAIT_S, now + REPEAT_S
        return [(device, self._asked) for device in devices]

    def _off(self, reason: str) -> Sends:
        kept = self.record
        kept.phase, kept.reason, kept.ended, kept.awaited = Phase.OFF, reason, kept.phase, set()
        return [(device, schemas.SumOff()) for device in sorted(kept.keys)]

    def _again(self, device: str, keys: schemas.SumKeys) -> Sends:
        """What a device missed that announces its keys once more, or too late."""
        kept = self.record
        if kept.phase is Phase.OFF or kept.members.announced.get(device) != keys.model_copy(update={"key": None}):
            return [(device, schemas.SumOff())]
        if kept.phase is Phase.SHARES:
            return [(device, kept.members)] if device in kept.awaited else []
        return [(device, self._dealt_to(device) if device in kept.peers else schemas.SumOff())]


Merge = Callable[[OpenedSum], None]


@dataclass(frozen=True)
class SumFailure:
    """Why a round went on without its sum; `ended`: what the sum waited for, None where it had all answers."""

    round: int
    reason: str
    ended: Phase | None


class SealedSums:
    """The sums of one federation, one attempt after the other.

    Args:
        spec: of the federation; one without sealed parts has no sums, and every call does nothing.
        store: the database.
        publisher: sends the steps.
        events: the event log.
        clock: seconds.
        is_member: whether a device may still take part.

    Attributes:
        failure: of the last sum, if it could not be opened or is in no aggregate; kept in memory only.
    """

    def __init__(
        self,
        spec: FederationSpec,
        store: Store,
        publisher: Publisher,
        events: EventLog,
        clock: Callable[[], float],
        is_member: Callable[[str], bool],
    ) -> None:
        self._spec, self._store, self._publisher, self._events, self._clock = spec, store, publisher, events, clock
        self._is_member = is_member
        self._board: SumBoard | None = None
        self._at = schemas.RoundAttempt(0, 0)
        self._merge: Merge | None = None
        self._stored: str | None = None
        self.failure: SumFailure | None = None

    def begin(self, at: schemas.RoundAttempt, participants: Collection[str]) -> None:
        """An attempt is open; after a restart its sum goes on."""
        if not self._spec.sealed_in(at.round):
            self._board = self._merge = None
            return
        self._at, self._merge = at, None
        self._stored = self._store.sealed_sums.of(self._spec.federation, self._at)
        sum_round = SumRound(self._spec.federation, at.round, at.attempt)
        self._board = SumBoard(sum_round, participants, self._stored)

    def end(self) -> None:
        """The attempt failed."""
        self._board = self._merge = None

    def receive(self, device: str, message: schemas.SumUp) -> None:
        """Take a device's step, or leave the device out of the sum for it."""
        board = self._board
        if board is None or not self._is_member(device) or message.at != self._at:
            return
        try:
            board.check(device, message.body)
        except WireError as error:
            self._events.write("sum_refused", **self._about, client=device, reason=str(error))
            self._follow(board, board.leave_out(device, self._clock()))
        else:
            self._follow(board, board.receive(device, message.body, self._clock()))

    def link_is_back(self) -> None:
        """Devices could not answer for a while."""
        if self._board is not None:
            self._board.wait_anew()

    def tick(self, there: Collection[str]) -> None:
        """Time went on, with a link; `there`: who may still take part in the attempt."""
        if self._board is not None and self._board.waits:
            self._follow(self._board, self._board.tick(there, self._clock()))

    def open(self, accepted: Collection[str], merge: Merge) -> None:
        """Open the sum of these clients' sealed numbers, then call `merge`; where it can't be opened, without it."""
        if self._board is None:
            merge(OpenedSum())
            return
        self._merge = merge
        self._follow(self._board, self._board.close(accepted, self._clock()))

    def lost(self, at: schemas.RoundAttempt, reason: str) -> None:
        """The aggregate of an attempt has no sum although it could be opened."""
        self.failure = SumFailure(at.round, reason, None)
        self._events.write("sum_off", round=at.round, attempt=at.attempt, reason=reason)

    @property
    def _about(self) -> dict[str, EventValue]:
        return {"round": self._at.round, "attempt": self._at.attempt}

    def _follow(self, board: SumBoard, sends: Sends) -> None:
        if (content := board.content) != self._stored:
            self._store.sealed_sums.keep(self._spec.federation, self._at, content)
            self._stored = content
        for device, step in sends:
            self._publisher.sum_step(device, self._at, step)
        if board.record.phase in (Phase.OPENED, Phase.OFF) and self._merge is not None:
            merge, self._merge = self._merge, None
            merge(self._opened(board))

    def _opened(self, board: SumBoard) -> OpenedSum:
        reason = board.record.reason
        if board.record.phase is Phase.OPENED:
            try:
                parts = self._spec.sealed_in(self._at.round)
                correction = board.correction(sum(number_count(self._spec.layouts[part]) for part in parts))
            except WireError as error:  # a device lied about its shares
                reason = str(error)
            else:
                self.failure = None
                self._events.write("sum_opened", **self._about, clients=list(board.record.survivors))
                return OpenedSum(board.record.survivors, board.digest, correction.astype("<u4").tobytes())
        self.failure = SumFailure(self._at.round, reason, board.record.ended)
        self._events.write("sum_off", **self._about, reason=reason)
        return OpenedSum()
