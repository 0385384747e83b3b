"""The masked sum of a federation's open attempt: kept in the database before anything is sent, and opened before the merge."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.storage.store import Store
from coordinator.sums.board import Phase, Sends, SumBoard
from fedcg.event_log import EventLog, EventValue
from fedcg.learning.spec import FederationSpec
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import VerifyKey
from fedcg.wire.messages.schemas import RoundAttempt, SumUp
from fedcg.wire.parts import numbers_size
from fedcg.wire.sums import SumRound

Merge = Callable[[OpenedSum], None]


@dataclass(frozen=True)
class SumFailure:
    """Why a round went on without its sum; `ended`: what the sum waited for, None where it had all answers."""

    round: int
    reason: str
    ended: Phase | None


class MaskedSums:
    """The sums of one federation, one attempt after the other.

    Args:
        spec: of the federation; one without summed parts has no sums, and every call does nothing.
        store: the database.
        publisher: sends the steps.
        events: the event log.
        clock: seconds.
        key_of: a device's message key, None for one that is no member any more.

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
        key_of: Callable[[str], VerifyKey | None],
    ) -> None:
        self._spec, self._store, self._publisher, self._events, self._clock = spec, store, publisher, events, clock
        cap = spec.params.get("weight_cap")
        self._key_of, self._weight_cap = key_of, cap if isinstance(cap, int) else None
        self._board: SumBoard | None = None
        self._at = RoundAttempt(0, 0)
        self._merge: Merge | None = None
        self._stored: str | None = None
        self.failure: SumFailure | None = None

    def begin(self, at: RoundAttempt, participants: Collection[str]) -> None:
        """An attempt is open; after a restart its sum goes on."""
        if not self._spec.summed:
            return
        self._at, self._merge = at, None
        self._stored = self._store.masked_sums.of(self._spec.federation, self._at)
        sum_round = SumRound(self._spec.federation, at.round, at.attempt)
        self._board = SumBoard(sum_round, participants, self._stored)

    def end(self) -> None:
        """The attempt failed."""
        self._board = self._merge = None

    def receive(self, device: str, message: SumUp) -> None:
        """Take a device's step, or leave the device out of the sum for it."""
        board, key = self._board, self._key_of(device)
        if board is None or key is None or message.at != self._at:
            return
        try:
            board.check(device, message.body, key, self._weight_cap)
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
        """Open the sum of these clients' masked numbers, then call `merge`; where it can't be opened, without it."""
        if self._board is None:
            merge(OpenedSum())
            return
        self._merge = merge
        self._follow(self._board, self._board.close(accepted, self._clock()))

    def lost(self, at: RoundAttempt, reason: str) -> None:
        """The aggregate of an attempt has no sum although it could be opened."""
        self.failure = SumFailure(at.round, reason, None)
        self._events.write("sum_off", round=at.round, attempt=at.attempt, reason=reason)

    @property
    def _about(self) -> dict[str, EventValue]:
        return {"round": self._at.round, "attempt": self._at.attempt}

    def _follow(self, board: SumBoard, sends: Sends) -> None:
        if (content := board.content) != self._stored:
            self._store.masked_sums.keep(self._spec.federation, self._at, content)
            self._stored = content
        for device, step in sends:
            self._publisher.sum_step(device, self._at, step)
        if board.phase in (Phase.OPENED, Phase.OFF) and self._merge is not None:
            merge, self._merge = self._merge, None
            merge(self._opened(board))

    def _opened(self, board: SumBoard) -> OpenedSum:
        reason = board.reason
        if board.phase is Phase.OPENED:
            try:
                size = sum(numbers_size(self._spec.layouts[part]) for part in self._spec.summed)
                correction = board.correction(size)
            except WireError as error:  # a device lied about its shares
                reason = str(error)
            else:
                self.failure = None
                self._events.write("sum_opened", **self._about, clients=sorted(board.weights))
                return OpenedSum(tuple(sorted(board.weights.items())), correction.astype("<u4").tobytes())
        self.failure = SumFailure(self._at.round, reason, board.ended)
        self._events.write("sum_off", **self._about, reason=reason)
        return OpenedSum()
