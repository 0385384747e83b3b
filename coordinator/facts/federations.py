"""The federations and their rounds: what each one is, where it stands, and the attempts and updates of every round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import BaseModel, Field, Json

from coordinator.facts.known import Known
from coordinator.rounds.records import AttemptRecord, FederationRecord, ParticipantRecord
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.parts import Part, Report, ReportField


@dataclass(frozen=True)
class FederationFacts:
    """A federation and where it stands; `round` and `attempt` are those that are open, or open next.

    Attributes:
        status: what the operator wants of it; `phase` is what it does.
        online, participants: of the running service; empty where none runs.
        unapproved: participants that take part as soon as their owners approve the spec.
        summed: of `upload` what leaves devices behind masks only.
    """

    federation: str
    method: str
    spec: str
    classes: tuple[str, ...]
    upload: tuple[Part, ...]
    summed: tuple[Part, ...]
    report: tuple[ReportField, ...]
    codec: str
    aggregate_codec: str
    status: str
    phase: str
    round: int
    attempt: int
    rounds: int
    policy: RoundPolicy
    reason: str
    continued_from: str | None
    created_at: float
    connected: bool
    epoch: int | None
    aggregate: str | None
    worker_pid: int | None
    online: list[str]
    participants: list[str]
    unapproved: list[str]
    left_out: dict[str, str]
    barred: dict[str, str]
    refused: dict[str, int]


class UpdateFacts(BaseModel, from_attributes=True, frozen=True):
    """The end of a client's update.

    Attributes:
        weight: the number of examples that it counts for in the merge; 0 in quarantine, None when it is not merged (yet).
        distances: L2 distance of each part from the round's base.
        figures: what it does beside the attempt's other updates (docs/security.md), and the action and reasons where that is odd.
    """

    client: str
    artifact: str
    bytes: int = Field(validation_alias="size")
    outcome: str
    reason: str
    report: Json[Report] | None
    weight: int | None
    distances: dict[str, float] = Field(validation_alias="distance_of")
    figures: Json[dict[str, object]] | None
    facts: Json[dict[str, str]] | None
    manifest_at: float
    stored_at: float


@dataclass(frozen=True, kw_only=True)
class AttemptFacts(AttemptRecord):
    """One attempt of a round, with its invited clients; times are unix seconds."""

    participants: list[ParticipantRecord]
    updates: list[UpdateFacts]


@dataclass(frozen=True)
class RoundFacts:
    """A round: all its attempts, and its aggregate once there is one."""

    round: int
    state: str
    aggregate: str | None
    aggregate_bytes: int | None
    attempts: list[AttemptFacts]


def federation_facts(known: Known, record: FederationRecord) -> FederationFacts:
    """A federation, with the state of its service where one runs, else with the stored one."""
    service, state = known.services.get(record.id), known.state(record.id)
    spec, policy, aggregates = known.spec(record), record.policy, known.store.aggregates(record.id)
    return FederationFacts(
        federation=record.id,
        method=record.method,
        spec=record.spec,
        classes=spec.classes,
        upload=spec.upload,
        summed=spec.summed,
        report=spec.report,
        codec=spec.codec,
        aggregate_codec=spec.aggregate_codec,
        status=record.status.value,
        phase=state.label,
        round=state.round,
        attempt=state.attempt,
        rounds=policy.rounds,
        policy=policy,
        reason=record.reason(state),
        continued_from=record.continued_from,
        created_at=record.created_at,
        connected=service is not None and service.is_connected,
        epoch=None if service is None else service.epoch,
        aggregate=aggregates[-1].artifact if aggregates else None,
        worker_pid=None if service is None else service.round_driver.worker_pid,
        online=sorted(state.online),
        participants=sorted(state.participants),
        unapproved=sorted(state.unapproved),
        left_out=dict(state.left_out),
        barred=dict(state.barred),
        refused={} if service is None else service.refusals,
    )


def attempts_by_round(known: Known, federation: str) -> dict[int, list[AttemptRecord]]:
    """The attempts of every round that was opened, oldest first.

    Raises:
        NotFoundError: there is no such federation.
    """
    found: dict[int, list[AttemptRecord]] = defaultdict(list)
    for attempt in known.store.attempts(known.federation(federation).id):
        found[attempt.round].append(attempt)
    return dict(found)


def round_facts(known: Known, attempts: Sequence[AttemptRecord]) -> RoundFacts:
    """A round, from its attempts."""
    last = attempts[-1]
    aggregate = known.store.aggregate(last.federation, last.round)
    return RoundFacts(
        round=last.round,
        state=last.state.value,
        aggregate=None if aggregate is None else aggregate.artifact,
        aggregate_bytes=None if aggregate is None else aggregate.size,
        attempts=[_attempt(known, attempt) for attempt in attempts],
    )


def _attempt(known: Known, record: AttemptRecord) -> AttemptFacts:
    updates = [UpdateFacts.model_validate(update) for update in known.store.updates(record.federation, record.at)]
    participants = known.store.participants(record.federation, record.at)
    return AttemptFacts(**asdict(record), participants=participants, updates=updates)
