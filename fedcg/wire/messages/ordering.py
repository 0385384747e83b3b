"""Order on the wire: refuses messages that are too old, repeated or foreign. Order, not time, defeats replay.

Broadcasts must not go back in (epoch, round, attempt). Everything between one device and the coordinator belongs to a
session, made of a nonce from each side, and carries an increasing counter. Knows nothing of signatures; call it after them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from fedcg.wire.errors import OldEpochError, OtherSessionError, ReplayError
from fedcg.wire.messages.messages import AnyMessage, CoordinatorStatus, Finished, Offer

Position = tuple[int, int, int]
START: Position = (0, 0, 0)
MessageT = TypeVar("MessageT", bound=BaseModel)


class BroadcastOrder:
    """The highest (epoch, round, attempt) admitted from a coordinator; survives restarts when `highest` is stored."""

    def __init__(self, highest: Position = START) -> None:
        self.highest = highest
        self._is_over = False  # the highest is that of a `Finished`

    def admit(self, message: AnyMessage) -> None:
        """Admit a broadcast; an equal position is admitted, because retained messages repeat.

        A coordinator's status concerns its epoch only: its will is signed before any round of the epoch is known. The end
        comes after the offer of the same position.

        Raises:
            OldEpochError: its coordinator lost the lease.
            ReplayError: it is older than what was admitted before.
        """
        position = (message.epoch, message.round, message.attempt)
        if message.epoch < self.highest[0]:
            raise OldEpochError(
                f"a {message.kind} message of epoch {message.epoch} came after epoch {self.highest[0]}: "
                "a replay, or a coordinator that lost its lease"
            )
        if isinstance(message, CoordinatorStatus):
            position = max(self.highest, (message.epoch, 0, 0))
        is_after_the_end = self._is_over and isinstance(message, Offer) and position == self.highest
        if position < self.highest or is_after_the_end:
            raise ReplayError(
                f"a {message.kind} message of (epoch, round, attempt) {position} came after {self.highest}"
            )
        if position > self.highest or isinstance(message, Finished):
            self._is_over = isinstance(message, Finished)
        self.highest = position


def session_id(device_nonce: str, coordinator_nonce: str) -> str:
    """The name of the session that two nonces make: 64 hex digits of sha256."""
    return hashlib.sha256(f"fedcg/1 session\0{device_nonce}\0{coordinator_nonce}".encode()).hexdigest()


@dataclass
class Session:
    """One side of a session: stamps outgoing messages, admits incoming ones.

    Attributes:
        session_id: from `session_id`.
        next_out: the counter of the next message out; starts at 1.
        last_in: the highest counter that came in.
    """

    session_id: str
    next_out: int = 1
    last_in: int = 0

    def stamp(self, message: MessageT) -> MessageT:
        """The message with this session and the next counter."""
        stamped = message.model_copy(update={"session": self.session_id, "counter": self.next_out})
        self.next_out += 1
        return stamped

    def admit(self, message: AnyMessage) -> None:
        """Admit a message of the other side.

        Raises:
            OtherSessionError: another session's.
            ReplayError: a counter that was used already.
        """
        if message.session != self.session_id:
            raise OtherSessionError(f"a {message.kind} message of another session")
        if message.counter <= self.last_in:
            raise ReplayError(f"a {message.kind} message with counter {message.counter} came after {self.last_in}")
        self.last_in = message.counter
