"""Devices in sealed sums, each with a key for sums and a keeper on a disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from coordinator.sums import KEYS_WAIT_S, Phase, Sends, SumBoard
from edge_client.store.private_store import PrivateStore
from edge_client.store.roster import Roster
from edge_client.store.sum_keeper import Numbered, SumKeeper, SumMasks, masks_in
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey, VerifyKey
from fedcg.wire.parts import MIN_SUM_DEVICES, TAGS
from fedcg.wire.sealed_numbers import Numbers
from fedcg.wire.sums import SumRound, check_tags, unsealed
from tests.support.present import present

AT = SumRound("shapes", 3, 1)
SIZE = 5 + TAGS
SECRET = bytes(range(32))
"""The secret of the cohort."""


class Disk(PrivateStore):
    """The part of a device's store for sums, in memory; outlives its keeper."""

    def __init__(self, cohort: Cohort, name: str) -> None:
        self.cohort, self.name, self.writes = cohort, name, list[dict[str, Any]]()

    def sum_key(self) -> SigningKey:
        return self.cohort.keys[self.name]

    def cohort_secret(self) -> bytes:
        return SECRET

    def roster(self) -> Roster:
        return Roster(self.cohort.roster, frozenset(self.cohort.alone))

    def record(self, file: str) -> dict[str, Any]:
        return self.cohort.numbered[self.name].model_dump() if self.name in self.cohort.numbered else {}

    def sum_record(self, exchange: schemas.SumExchange) -> dict[str, Any]:
        return self.writes[-1] if self.writes else {}

    def save_sum_record(self, exchange: schemas.SumExchange, record: Mapping[str, Any]) -> None:
        self.writes.append(dict(record))


class Cohort:
    """Devices with keys, disks and keepers; a keeper is created again for each step, as after a power cut.

    Attributes:
        weights: number of images of each; `votes` likewise.
        numbered: facts about its numbers from each training process.
        alone: the devices whose owners allow their numbers to be seen alone.
    """

    def __init__(self, count: int, *names: str) -> None:
        self.names = [*names, *(f"box-{number:02}" for number in range(count))]
        self.keys = {name: SigningKey.generate() for name in self.names}
        self.disks = {name: Disk(self, name) for name in self.names}
        self.now = 0.0
        stream = np.random.default_rng(0)
        self.numbers = {name: stream.integers(0, 1 << 20, SIZE, dtype=np.uint32) for name in self.names}
        for numbers in self.numbers.values():
            numbers[1 : 1 + TAGS] = 0
        self.weights = dict.fromkeys(self.names, 5)
        self.votes = dict.fromkeys(self.names, 0)
        self.numbered = dict[str, Numbered]()
        self.alone = set[str]()
        self.least = MIN_SUM_DEVICES

    def later(self) -> float:
        """Return a time after all deadlines."""
        self.now += KEYS_WAIT_S
        return self.now

    def late(self, board: SumBoard) -> Sends:
        """Return the board's steps without the devices that have not answered."""
        return board.tick(self.names, self.now) if board.phase is Phase.OFF else self._late(board)

    def _late(self, board: SumBoard) -> Sends:
        board.tick(self.names, self.now)
        return board.tick(self.names, self.later())

    def masks(self, name: str, at: SumRound = AT) -> SumMasks | None:
        return masks_in(self.disks[name], name, at, ())

    def masked(self, name: str, at: SumRound = AT) -> Numbers:
        masks = present(self.masks(name, at))
        return masks.mask(self.numbers[name])

    def opened(self, total: Numbers, digest: str, survivors: Iterable[str], at: SumRound = AT) -> Numbers:
        """Return a device's reading of the sum that the coordinator publishes."""
        found = unsealed(total, at, digest, survivors, SECRET)
        check_tags(at, SECRET, found)
        found[1 : 1 + TAGS] = 0
        return found

    @property
    def roster(self) -> dict[str, VerifyKey]:
        return {name: key.public for name, key in self.keys.items()}

    def keeper(self, name: str, exchange: schemas.SumExchange = "parts") -> SumKeeper:
        return SumKeeper(self.disks[name], name, self.least, exchange)

    def answer(self, board: SumBoard, sends: Sends, deaf: set[str], at: SumRound = AT) -> Sends:
        """Pass messages to devices, and their answers to the board; `deaf` ones never answer. Return the board's next messages."""
        following: Sends = []
        for name, step in sends:
            if name in deaf:
                continue
            reply = self.reply(name, step, at)
            if reply is not None:
                following += board.receive(name, reply, self.now)
        return following or self.late(board)

    def reply(self, name: str, step: schemas.ToDevice, at: SumRound = AT) -> schemas.FromDevice | None:
        keeper = self.keeper(name, at.exchange)
        if isinstance(step, schemas.SumMembers):
            return keeper.members(at, step)
        if isinstance(step, schemas.SumDealt):
            keeper.dealt(at, step)
            return keeper.number(at) if at.exchange == "weights" else None
        if isinstance(step, schemas.SumOpened):
            keeper.opened(at, step)
        if isinstance(step, schemas.SumSurvivors):
            return keeper.survivors(at, step)
        if isinstance(step, schemas.SumOpening):
            return keeper.opening(at, step)
        return None

    def keys_of(self, name: str, at: SumRound = AT) -> schemas.SumKeys | None:
        """A device's announcement; its numbers, which move as far as the mean is, follow in training."""
        self.numbered[name] = Numbered(
            round=at.round, attempt=at.attempt, parts=("extractor",), sketch=(float(at.round),), to_mean=1.0, digest=""
        )
        return self.keeper(name, at.exchange).announce(at, self.weights[name], self.votes[name])

    def announced(self, name: str) -> schemas.SumKeys:
        """Return it as other devices receive it."""
        keys = present(self.keys_of(name))
        return keys.model_copy(update={"key": None})

    def announce(self, board: SumBoard, deaf: set[str], at: SumRound = AT) -> Sends:
        following: Sends = []
        for name in self.names:
            if name not in deaf and (keys := self.keys_of(name, at)) is not None:
                following += board.receive(name, keys, self.now)
        return following or self.late(board)
