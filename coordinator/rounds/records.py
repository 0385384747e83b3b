"""The coordinator's records as values: checked database rows with enums. No SQL here."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any

from pydantic import Json
from pydantic.dataclasses import dataclass

from coordinator.rounds.engine import Opening, Phase, RoundState, stalled_reason, standing_reason
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from fedcg.wire.parts import Part


class AttemptState(str, Enum):
    """The state of an attempt."""

    COLLECTING = "collecting"
    DISTILLING = "distilling"
    CLOSED = "closed"
    FAILED = "failed"


class ParticipantState(str, Enum):
    """The answer of an invited client."""

    INVITED = "invited"
    ACCEPTED = "accepted"
    DECLINED = "declined"


class DeviceState(str, Enum):
    """Whether a device may participate."""

    ENROLLED = "enrolled"
    REVOKED = "revoked"
    LEFT = "left"


class FederationStatus(str, Enum):
    """The operator's setting for a federation."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    ARCHIVED = "archived"

    @property
    def is_ended(self) -> bool:
        """Whether an operator ended it; only adding rounds restarts it."""
        return self in (FederationStatus.STOPPED, FederationStatus.ARCHIVED)


class TokenState(str, Enum):
    """Whether a token can still be used."""

    OPEN = "open"
    USED = "used"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True)
class DeviceRecord:
    """A device that has been enrolled; only devices in state `enrolled` may participate, and disabled ones are not invited.

    Attributes:
        site, note: the operator's texts about it; they never reach the device.
        readmitted_at: failures in attempts opened before it no longer leave the device out of rounds.
    """

    id: str
    public_key: str
    enrolled_at: float
    last_seen_at: float | None
    agent: str | None
    state: DeviceState = DeviceState.ENROLLED
    ended_at: float | None = None
    ended_because: str = ""
    disabled_at: float | None = None
    disabled_because: str = ""
    site: str = ""
    note: str = ""
    readmitted_at: float | None = None


@dataclass(frozen=True)
class CertificateRecord:
    """A device's TLS certificate; `serial` in hex, times are unix times."""

    serial: str
    device: str
    issued_at: float
    expires_at: float
    revoked_at: float | None
    pem: str


@dataclass(frozen=True)
class TokenRecord:
    """An enrolment token as the coordinator stores it.

    Attributes:
        secret_hash: sha256 of its secret, in hex.
        device: the only id that it enrols, if it is bound.
        replaces: whether a new machine replaces `device`.
        used_for: digest of the request that used it (`membership`): for a while, the same request gets the same response.
        serial: serial number of the issued certificate.
        federation: federation in the device's agent.toml; None for the first one.
        labels, site: what the device gets when it enrols; labels with blanks between.
    """

    id: str
    secret_hash: str
    device: str | None
    replaces: bool
    created_at: float
    expires_at: float
    revoked_at: float | None = None
    used_at: float | None = None
    used_by: str | None = None
    used_for: str | None = None
    serial: str | None = None
    federation: str | None = None
    labels: str = ""
    site: str = ""

    def state(self, now: float) -> TokenState:
        """Whether the token can still be used."""
        if self.used_at is not None:
            return TokenState.USED
        if self.revoked_at is not None:
            return TokenState.REVOKED
        return TokenState.OPEN if now < self.expires_at else TokenState.EXPIRED


@dataclass(frozen=True)
class FederationRecord:
    """A federation; `spec` is the artifact id of its spec, which is also the spec's digest.

    Attributes:
        policy: rules of its rounds: the plan's values with later changes; JSON in the database.
        first_attempt: the attempt from which `max_attempts` is counted.
        status: the operator's setting, with the reason in `status_reason`.
        continued_from: the federation whose last aggregate it started from.
        forgotten: ids of devices that no longer participate, separated by blanks.
    """

    id: str
    method: str
    spec: str
    policy: RoundPolicy | Json[RoundPolicy]
    created_at: float
    first_attempt: int = 1
    status: FederationStatus = FederationStatus.RUNNING
    status_reason: str = ""
    continued_from: str | None = None
    forgotten: str = ""

    def reason(self, state: RoundState) -> str:
        """Why it is not advancing, or will stop after the open round, in this state of the round engine; "" if it is."""
        if self.status is not FederationStatus.PAUSED:
            return standing_reason(state) or self.status_reason
        is_open = state.phase in (Phase.COLLECTING, Phase.DISTILLING)
        return f"it pauses after this round: {self.status_reason}" if is_open else state.reason

    def after_failure(self, last: AttemptRecord) -> RoundState:
        """The state of the round engine after the last attempt failed."""
        failed = last.attempt - self.first_attempt + 1
        state = RoundState(
            self.policy,
            round=last.round,
            attempt=last.attempt + 1,
            reason=last.reason,
            first_attempt=self.first_attempt,
            opening=Opening(failed_at=last.closed_at or 0.0),
        )
        if failed < self.policy.max_attempts:
            return state
        return replace(state, phase=Phase.STALLED, reason=stalled_reason(state, failed), opening=Opening())


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
    distilling_at: float | None = None
    closed_at: float | None = None
    reason: str = ""

    @property
    def at(self) -> RoundAttempt:
        """The round attempt."""
        return RoundAttempt(self.round, self.attempt)


@dataclass(frozen=True)
class ParticipantRecord:
    """An invited client of an attempt.

    Attributes:
        share: requested share of the spec's local steps.
        accepted_at: unix time.
        predicted_s: its predicted seconds from then until its update.
        training_at: unix time of its first progress report, if its owner allows `health`; its download was complete then.
        declined_at: unix time when it declined or was dropped.
    """

    client: str
    state: ParticipantState
    reason: str = ""
    share: float = 1.0
    accepted_at: float | None = None
    predicted_s: float | None = None
    training_at: float | None = None
    declined_at: float | None = None


@dataclass(frozen=True)
class UpdateRecord:
    """How an update ended.

    Attributes:
        report: the device's report, as JSON.
        distances: JSON of each part's distance from the round's base.
        weight: its weight in examples, once the updates to merge are known.
        figures: JSON of its `updates.robustness.Figures` and their verdict.
        facts: JSON of the device's facts in the update's header.
    """

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
    distances: str | None = None
    weight: int | None = None
    figures: str | None = None
    facts: str | None = None

    @property
    def at(self) -> RoundAttempt:
        """The round attempt."""
        return RoundAttempt(self.round, self.attempt)

    @cached_property
    def reported(self) -> dict[str, Any]:
        """`report` by field, without fields that the device did not report."""
        return {name: value for name, value in json.loads(self.report or "{}").items() if value is not None}

    @property
    def examples(self) -> int:
        """The number of examples in the device's report; 1 if not reported."""
        return int(self.reported.get("examples", 1))

    @property
    def accuracy(self) -> float | None:
        """Reported accuracy of the personal model on the device's held-out images, in [0, 1]."""
        return self.reported.get("accuracy")

    @property
    def alone(self) -> float | None:
        """Reported accuracy of the local-only model: the same model trained on the same images without the federation."""
        return self.reported.get("shadow")

    @property
    def gain(self) -> float | None:
        """`accuracy` - `alone`; None if one of them is not reported."""
        return None if self.accuracy is None or self.alone is None else self.accuracy - self.alone

    @cached_property
    def judged(self) -> dict[str, Any]:
        """`figures` by name."""
        return dict(json.loads(self.figures or "{}"))

    @cached_property
    def described(self) -> dict[str, str]:
        """`facts` by name."""
        return dict(json.loads(self.facts or "{}"))

    @property
    def distance_of(self) -> dict[Part, float]:
        """`distances` by part."""
        return {Part(part): float(distance) for part, distance in json.loads(self.distances or "{}").items()}


@dataclass(frozen=True)
class AggregateRecord:
    """The aggregate of a round (round 0: the initial one) and the server state stored with it.

    Attributes:
        pinned: why an operator keeps it, e.g. "best": it is never deleted; None for others.
    """

    federation: str
    round: int
    attempt: int
    artifact: str
    size: int
    server_state: str
    stored_at: float
    pinned: str | None = None


@dataclass(frozen=True)
class ApiTokenRecord:
    """An API token as stored by the coordinator; times are unix times.

    Attributes:
        role: a value of `Role`.
        secret_hash: salt and sha256 of salt and secret, both in hex, separated by `$`.
        expires_at: None for a token that does not expire.
    """

    id: str
    name: str
    role: str
    secret_hash: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Whether it was not revoked and has not expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class PresenceRecord:
    """A device came online or went offline; `at` is unix time."""

    federation: str
    device: str
    at: float
    online: bool
    reason: str = ""


@dataclass(frozen=True)
class ConditionRecord:
    """The last self-report of a device; `at` is the unix time when its content first arrived, `content` a `DeviceCondition` as JSON."""

    federation: str
    device: str
    at: float
    content: str
