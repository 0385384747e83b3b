"""What the coordinator remembers, as values. The database's rows become these; nothing here knows SQL."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coordinator.rounds import Policy
from fedcg.wire.messages import Outcome


class AttemptState(str, Enum):
    """How far an attempt got."""

    COLLECTING = "collecting"
    DISTILLING = "distilling"
    CLOSED = "closed"
    FAILED = "failed"


class ParticipantState(str, Enum):
    """What an invited client answered."""

    INVITED = "invited"
    ACCEPTED = "accepted"
    DECLINED = "declined"


@dataclass(frozen=True)
class DeviceRecord:
    """An enrolled device."""

    id: str
    public_key: str
    enrolled_at: float
    last_seen_at: float | None
    agent: str | None


@dataclass(frozen=True)
class FederationRecord:
    """A federation; `spec` is the artifact id of its spec, which is also the spec's digest."""

    id: str
    method: str
    spec: str
    rounds: int
    min_clients: int
    max_attempts: int
    deadline_s: float
    first_attempt: int
    created_at: float

    @property
    def policy(self) -> Policy:
        """The part of it that the round engine needs."""
        return Policy(self.rounds, self.min_clients, self.max_attempts, self.deadline_s)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt of a round; `base` is the aggregate it starts from, times are unix times."""

    federation: str
    round: int
    attempt: int
    state: AttemptState
    base: str
    opened_at: float
    deadline_at: float
    distilling_at: float | None
    aggregate_stored_at: float | None
    closed_at: float | None
    reason: str


@dataclass(frozen=True)
class ParticipantRecord:
    """An invited client of an attempt."""

    client: str
    state: ParticipantState
    reason: str


@dataclass(frozen=True)
class UpdateRecord:
    """How an update ended; `report` is the JSON that the device let out."""

    federation: str
    round: int
    attempt: int
    client: str
    artifact: str
    size: int
    outcome: Outcome
    reason: str
    report: str | None
    manifest_at: float
    stored_at: float


@dataclass(frozen=True)
class AggregateRecord:
    """The aggregate of a round (round 0: the initial one) and the server state stored with it."""

    federation: str
    round: int
    attempt: int
    artifact: str
    size: int
    server_state: str
    stored_at: float
