"""The commands of the round engine, which `round_driver` carries out. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from fedcg.wire.messages.schemas import OfAttempt


@dataclass(frozen=True)
class OpenAttempt(OfAttempt):
    """Store the attempt, publish its offer, broadcast the aggregate."""

    participants: frozenset[str]
    deadline_at: float


@dataclass(frozen=True)
class ResumeAttempt(OfAttempt):
    """Publish the offer of an attempt that is stored already; its deadline may have moved."""

    deadline_at: float


@dataclass(frozen=True)
class MoveDeadline(OfAttempt):
    """Store another deadline of the open attempt; `reason` is for the operator, "" when there is nothing to look at."""

    deadline_at: float
    reason: str = ""


@dataclass(frozen=True)
class Invite(OfAttempt):
    """Ask a participant (again) for its update."""

    client: str


@dataclass(frozen=True)
class Distil(OfAttempt):
    """Merge the updates that are stored; these clients' at least."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class FailAttempt(OfAttempt):
    """Store that the attempt failed; the next one gets the next number.

    Attributes:
        first_attempt: the attempt that `max_attempts` is counted from now; one later when this one does not count.
    """

    reason: str
    first_attempt: int = 1


@dataclass(frozen=True)
class Stall:
    """Too many attempts failed: none opens until an operator resumes."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Publish the final aggregate."""


Command = OpenAttempt | ResumeAttempt | MoveDeadline | Invite | Distil | FailAttempt | Stall | Finish
