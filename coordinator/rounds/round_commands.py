"""What the round engine commands; `conductor` does it. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenAttempt:
    """Store the attempt, publish its offer, broadcast the aggregate."""

    round: int
    attempt: int
    participants: frozenset[str]
    deadline_at: float


@dataclass(frozen=True)
class ResumeAttempt:
    """Publish the offer of an attempt that is stored already; its deadline may have moved."""

    round: int
    attempt: int
    deadline_at: float


@dataclass(frozen=True)
class MoveDeadline:
    """Store another deadline of the open attempt; `reason` is for the operator, "" when there is nothing to look at."""

    round: int
    attempt: int
    deadline_at: float
    reason: str = ""


@dataclass(frozen=True)
class Invite:
    """Ask a participant (again) for its update."""

    round: int
    attempt: int
    client: str


@dataclass(frozen=True)
class Distil:
    """Merge the updates of exactly these clients."""

    round: int
    attempt: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class FailAttempt:
    """Store that the attempt failed; the next one gets the next number.

    Attributes:
        first_attempt: the attempt that `max_attempts` is counted from now; one later when this one does not count.
    """

    round: int
    attempt: int
    reason: str
    first_attempt: int = 1


@dataclass(frozen=True)
class Pause:
    """Nothing happens any more until an operator resumes."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Publish the final aggregate."""


Command = OpenAttempt | ResumeAttempt | MoveDeadline | Invite | Distil | FailAttempt | Pause | Finish
