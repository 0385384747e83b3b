"""The masked sum of one round attempt, on the coordinator's side: collects the devices' steps and says what to send next. Pure but for keys.

It never decides about the round: where too few answer in time there is no sum, and the round goes on without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np

from fedcg.wire.errors import SumError
from fedcg.wire.messages.sum_steps import (
    MAX_SUM_DEVICES,
    FromDevice,
    SumDealt,
    SumKeys,
    SumMembers,
    SumOff,
    SumOpening,
    SumRevealed,
    SumShares,
    SumSigned,
    SumSurvivors,
    ToDevice,
)
from fedcg.wire.sums.protocol import MIN_DEVICES, Survivors, threshold_of, unmask
from fedcg.wire.sums.secrets import Numbers, SumRound
from fedcg.wire.sums.steps import from_hex, members_of

WAIT_S = 15.0
"""How long a step waits for those who have not answered."""
Sends = list[tuple[str, ToDevice]]


class Phase(str, Enum):
    """What the sum waits for."""

    KEYS = "keys"
    SHARES = "shares"
    NUMBERS = "numbers"
    SIGNATURES = "signatures"
    OPENING = "opening"
    OPENED = "opened"
    OFF = "off"


class SumBoard:
    """One sum.

    Args:
        at: of the attempt.
        participants: those who were invited.
        now: seconds, of any clock.

    Attributes:
        phase: what it waits for.
        reason: why there is no sum, once it is off.
        peers: whose shares were dealt out; `survivors` those of them whose numbers came.
    """

    def __init__(self, at: SumRound, participants: Iterable[str], now: float) -> None:
        self.at = at
        self.phase, self.reason = Phase.KEYS, ""
        self.peers: tuple[str, ...] = ()
        self.survivors: tuple[str, ...] = ()
        self._awaited = set(participants)
        self._until = now + WAIT_S
        self._keys: dict[str, SumKeys] = {}
        self._members = SumMembers(announced={})
        self._sealed: dict[str, dict[str, str]] = {}
        self._signatures: dict[str, str] = {}
        self._shares: dict[str, dict[str, str]] = {}

    def receive(self, device: str, step: FromDevice, now: float) -> Sends:
        """Take a device's step; what is not waited for from it is passed over."""
        if device not in self._awaited:
            return self._again(device)
        if isinstance(step, SumKeys) and self.phase is Phase.KEYS:
            self._keys[device] = step
        elif isinstance(step, SumShares) and self.phase is Phase.SHARES:
            if step.sealed.keys() != self._members.announced.keys():
                return []
            self._sealed[device] = step.sealed
        elif isinstance(step, SumSigned) and self.phase is Phase.SIGNATURES:
            self._signatures[device] = step.signature
        elif isinstance(step, SumRevealed) and self.phase is Phase.OPENING:
            if step.shares.keys() != set(self.peers):
                return []
            self._shares[device] = step.shares
        else:
            return []
        self._awaited.discard(device)
        return self._next(now) if not self._awaited else []

    def gone(self, device: str, now: float) -> Sends:
        """A device declined, or is no member any more: nothing more comes from it."""
        self._awaited.discard(device)
        return self._next(now) if not self._awaited else []

    def tick(self, now: float) -> Sends:
        """Go on without those who did not answer in time."""
        is_waiting = self.phase in (Phase.KEYS, Phase.SHARES, Phase.SIGNATURES, Phase.OPENING)
        return self._next(now) if is_waiting and now >= self._until else []

    def close(self, accepted: Iterable[str], now: float) -> Sends:
        """The attempt's updates are these: ask for signatures over the list of those that hold masked numbers."""
        if self.phase is not Phase.NUMBERS:
            return self._off(f"the attempt was closed while it waited for {self.phase.value}")
        self.survivors = tuple(sorted(set(accepted) & set(self.peers)))
        if len(self.survivors) < self._needed:
            return self._off(f"{len(self.survivors)} of {self._needed} masked numbers came")
        return self._ask(Phase.SIGNATURES, SumSurvivors(names=self.survivors), now)

    def correction(self, size: int) -> Numbers:
        """What is to be added, modulo 2^32, to the sum of the survivors' masked numbers, [size] uint32.

        Raises:
            SumError: it is not opened, or shares do not fit what was announced; names the device.
        """
        if self.phase is not Phase.OPENED:
            raise SumError(f"the sum waits for {self.phase.value}")
        signatures = from_hex(self._signatures)
        survivors = Survivors(self.peers, self.survivors, signatures)
        revealed = {device: from_hex(shares) for device, shares in self._shares.items()}
        return unmask(np.zeros(size, np.uint32), members_of(self.at, self._members), survivors, revealed)

    @property
    def _needed(self) -> int:
        return max(MIN_DEVICES, threshold_of(len(self._members.announced)))

    def _next(self, now: float) -> Sends:
        if self.phase is Phase.KEYS:
            return self._begin(now)
        if self.phase is Phase.SHARES:
            return self._deal()
        if self.phase is Phase.SIGNATURES:
            if len(self._signatures) < self._members_threshold:
                return self._off(f"{len(self._signatures)} of {self._members_threshold} devices signed the list")
            return self._ask(Phase.OPENING, SumOpening(names=self.survivors, signatures=self._signatures), now)
        if self.phase is Phase.OPENING:
            if len(self._shares) < self._members_threshold:
                return self._off(f"{len(self._shares)} of {self._members_threshold} devices gave their shares")
            self.phase = Phase.OPENED
        return []

    @property
    def _members_threshold(self) -> int:
        return threshold_of(len(self._members.announced))

    def _begin(self, now: float) -> Sends:
        chosen = sorted(self._keys)[:MAX_SUM_DEVICES]
        if len(chosen) < MIN_DEVICES:
            return self._off(f"{len(chosen)} of {MIN_DEVICES} devices announced keys")
        self._members = SumMembers(announced={device: self._keys[device] for device in chosen})
        self.phase, self._awaited, self._until = Phase.SHARES, set(chosen), now + WAIT_S
        left = [(device, SumOff()) for device in sorted(self._keys) if device not in chosen]
        return [*((device, self._members) for device in chosen), *left]

    def _deal(self) -> Sends:
        self.peers = tuple(sorted(self._sealed))
        if len(self.peers) < self._needed:
            return self._off(f"{len(self.peers)} of {self._needed} devices dealt out shares")
        self.phase = Phase.NUMBERS
        others = [(device, SumOff()) for device in self._members.announced if device not in self.peers]
        return [*((device, self._dealt_to(device)) for device in self.peers), *others]

    def _dealt_to(self, device: str) -> SumDealt:
        return SumDealt(sealed={peer: self._sealed[peer][device] for peer in self.peers})

    def _ask(self, phase: Phase, step: ToDevice, now: float) -> Sends:
        self.phase, self._awaited, self._until = phase, set(self.survivors), now + WAIT_S
        return [(device, step) for device in self.survivors]

    def _off(self, reason: str) -> Sends:
        self.phase, self.reason, self._awaited = Phase.OFF, reason, set()
        return [(device, SumOff()) for device in sorted(self._keys)]

    def _again(self, device: str) -> Sends:
        """What a device missed that asks again: its last step came twice."""
        if self.phase is Phase.SHARES and device in self._members.announced:
            return [(device, self._members)]
        if self.phase is Phase.NUMBERS and device in self.peers:
            return [(device, self._dealt_to(device))]
        return [(device, SumOff())] if self.phase is Phase.OFF or device not in self.peers else []
