"""Facts about federations: settings, open round with the phase of every client, and attempts and updates of all rounds."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from pydantic import BaseModel, Field, Json

from coordinator.facts.known import Known
from coordinator.rounds import records
from coordinator.rounds.engine import WAITS_FOR_OWNERS, Phase, RoundState, wanted_updates
from coordinator.service.reports import DeviceProgress, MergeProgress
from coordinator.service.service import Service
from fedcg.learning.spec import RoundPolicy
from fedcg.values import Value
from fedcg.wire.parts import Part, Report, ReportField


class Position(Value):
    """The state of a federation; `round` and `attempt` are the open ones, or those that open next.

    Attributes:
        status: the status set by the operator, or finished; `phase` is the present activity.
        unapproved: participants that join as soon as their owners approve the spec. The phase is "waits_for_owners" if the
            open attempt can't close without them.
    """

    federation: str
    status: str
    phase: str
    round: int
    attempt: int
    rounds: int
    reason: str
    unapproved: list[str]


class FederationFacts(Position):
    """A federation and its state.

    Attributes:
        online, participants: from the running service; empty if none is running.
        sealed: parts that leave devices only inside the part `sealed`.
        forgotten: permanently excluded devices.
    """

    method: str
    spec: str
    classes: tuple[str, ...]
    upload: tuple[Part, ...]
    sealed: tuple[Part, ...]
    report: tuple[ReportField, ...]
    codec: str
    aggregate_codec: str
    policy: RoundPolicy
    continued_from: str | None
    forgotten: list[str]
    created_at: float
    connected: bool
    epoch: int | None
    aggregate: str | None
    worker_pid: int | None
    online: list[str]
    participants: list[str]
    left_out: dict[str, str]
    barred: dict[str, str]
    refused: dict[str, int]


class UpdateFacts(BaseModel, from_attributes=True, frozen=True):
    """A client's update and its outcome.

    Attributes:
        weight: the number of examples that it counts for in the merge; 0 in quarantine, None if it is not merged (yet).
        distances: L2 distance of each part from the round's base.
        figures: comparison with the other updates of the attempt (docs/explanation/robustness.md), and action and reasons if it is odd.
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
class AttemptFacts(records.AttemptRecord):
    """One attempt of a round, with its invited clients; times are unix seconds."""

    participants: list[records.ParticipantRecord]
    updates: list[UpdateFacts]


class RoundFacts(Value):
    """A round: all its attempts, and its aggregate once there is one."""

    round: int
    state: str
    aggregate: str | None
    aggregate_bytes: int | None
    attempts: list[AttemptFacts]


def federation_facts(known: Known, record: records.FederationRecord) -> FederationFacts:
    """A federation with the state of its running service, else with the stored state."""
    service, state = known.services.get(record.id), known.state(record.id)
    spec, aggregates = known.spec(record), known.store.aggregates(record.id)
    return FederationFacts(
        **asdict(_position(record, state)),
        **{name: getattr(spec, name) for name in ("classes", "upload", "sealed", "report", "codec", "aggregate_codec")},
        **{name: getattr(record, name) for name in ("method", "spec", "policy", "continued_from", "created_at")},
        forgotten=record.forgotten.split(),
        connected=service is not None and service.is_connected,
        epoch=None if service is None else service.epoch,
        aggregate=aggregates[-1].artifact if aggregates else None,
        worker_pid=None if service is None else service.round_driver.worker_pid,
        online=sorted(state.online),
        participants=sorted(state.participants),
        left_out=dict(state.left_out),
        barred=dict(state.barred),
        refused={} if service is None else service.refusals,
    )


def _position(record: records.FederationRecord, state: RoundState) -> Position:
    is_finished = state.phase is Phase.FINISHED and not record.status.is_ended
    status, reason = Phase.FINISHED.value if is_finished else record.status.value, record.reason(state)
    at = state.round, state.attempt, state.policy.rounds
    return Position(record.id, status, state.label, *at, reason, sorted(state.unapproved))


def attempts_by_round(known: Known, federation: str) -> dict[int, list[records.AttemptRecord]]:
    """The attempts of every opened round, oldest first.

    Raises:
        NotFoundError: there is no such federation.
    """
    found: dict[int, list[records.AttemptRecord]] = defaultdict(list)
    for attempt in known.store.attempts(known.federation(federation).id):
        found[attempt.round].append(attempt)
    return dict(found)


def round_facts(known: Known, attempts: Sequence[records.AttemptRecord]) -> RoundFacts:
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


def _attempt(known: Known, record: records.AttemptRecord) -> AttemptFacts:
    updates = [UpdateFacts.model_validate(update) for update in known.store.updates(record.federation, record.at)]
    participants = known.store.participants(record.federation, record.at)
    return AttemptFacts(**asdict(record), participants=participants, updates=updates)


ESTIMATED_FROM = 5
"""Number of closed rounds whose median duration estimates the next ones."""


class ClientPhase(str, Enum):
    """What a client does according to its messages, in display order."""

    DECLINED = "declined"
    QUARANTINED = "quarantined"
    UNAPPROVED = "unapproved"
    SILENT = "silent"
    INVITED = "invited"
    TRAINING = "training"
    UPLOADING = "uploading"
    DELIVERED = "delivered"


class ClientNow(Value):
    """A client of the open attempt.

    Attributes:
        reason: why it declined, can't join yet, or is silent; or the treatment of an odd update.
        done: completed share of its present training phase, in [0, 1]; None if it reports no progress.
        ends_at: when that phase will end at the reported rate; unix time.
        share: share of the spec's local steps that it takes (policy `pace`).
        expected_at: when it predicted to finish its update; unix time.
    """

    client: str
    phase: ClientPhase
    reason: str = ""
    done: float | None = None
    ends_at: float | None = None
    share: float = 1.0
    expected_at: float | None = None


class RoundSummary(Value):
    """A closed round.

    Attributes:
        attempts: number of attempts that it took.
        seconds: duration of the last one, from opening to aggregate.
        merged: number of updates in its aggregate.
        accuracy, alone: mean accuracies in [0, 1] that its clients reported: personal and local-only.
    """

    round: int
    attempts: int
    seconds: float
    merged: int
    accuracy: float | None
    alone: float | None


class CurrentRound(Position):
    """The present state of a federation; times are unix times.

    Attributes:
        is_served: whether a coordinator is running it; otherwise no device is online.
        quorum: minimum number of updates to close a round.
        wanted: number of updates that closes the attempt immediately; `delivered` includes those in quarantine.
        round_s: median duration of the last closed rounds; None before the first one.
        round_ends_at, ends_at: estimated end of the open round and of the federation; None if unknown.
            For `ends_at`, an overdue round is assumed to end now.
        merge: the running merge, or the last one since the coordinator started.
        enrolled: number of devices that may participate.
        waits_for: what the next attempt is waiting for.
        odd: by client, the treatment of its last update if that was odd.
        last_rounds: the last closed rounds, newest first.
    """

    is_served: bool
    is_connected: bool
    quorum: int
    wanted: int
    delivered: int
    opened_at: float | None
    deadline_at: float | None
    round_s: float | None
    round_ends_at: float | None
    ends_at: float | None
    online: int
    enrolled: int
    clients: list[ClientNow] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    merge: MergeProgress | None = None
    waits_for: str = ""
    odd: dict[str, str] = field(default_factory=dict)
    last_rounds: list[RoundSummary] = field(default_factory=list)


def current_round(known: Known, federation: str) -> CurrentRound:
    """The present state of a federation.

    Raises:
        NotFoundError: no federation has this name.
    """
    record = known.federation(federation)
    service, state = known.services.get(federation), known.state(federation)
    attempts = known.store.attempts(federation)
    is_open = state.phase in (Phase.COLLECTING, Phase.DISTILLING)
    attempt = attempts[-1] if is_open and attempts else None
    clients = [] if attempt is None else _clients(known, attempt, state, service)
    round_s = typical_round_s(attempts)
    enrolled = len(known.members)
    left = state.policy.rounds - state.round + 1
    begun = known.now if attempt is None else attempt.opened_at
    this_one_ends_at = max(known.now, begun + (round_s or 0.0))
    is_over = state.phase is Phase.FINISHED or record.status.is_ended
    stands = (Phase.PAUSED.value, Phase.STALLED.value, WAITS_FOR_OWNERS)
    is_still = is_over or service is None or state.label in stands
    goes_on = round_s is not None and not is_still and record.status is records.FederationStatus.RUNNING
    return CurrentRound(
        **asdict(_position(record, state)),
        is_served=service is not None,
        is_connected=service is not None and service.is_connected,
        quorum=state.policy.quorum,
        wanted=wanted_updates(state.policy, len(state.participants)) if is_open else state.policy.quorum,
        delivered=sum(each.phase in (ClientPhase.DELIVERED, ClientPhase.QUARANTINED) for each in clients),
        opened_at=None if attempt is None else attempt.opened_at,
        deadline_at=state.deadline_at if state.label == Phase.COLLECTING.value else None,
        round_s=round_s,
        round_ends_at=begun + round_s if round_s and not is_still and attempt is not None else None,
        ends_at=this_one_ends_at + round_s * (left - 1) if round_s and goes_on else None,
        online=len(state.online),
        enrolled=enrolled,
        clients=sorted(clients, key=lambda each: (list(ClientPhase).index(each.phase), each.client)),
        counts={phase.value: sum(each.phase is phase for each in clients) for phase in ClientPhase},
        merge=None if service is None else service.round_driver.merge,
        odd={}
        if service is None
        else {client: f"round {each.round}: {each.reason}" for client, each in service.round_driver.odd.items()},
        waits_for=_waits_for(record, state, service) if state.phase is Phase.WAITING and not is_over else "",
        last_rounds=_last_rounds(known, federation, attempts),
    )


def _last_rounds(known: Known, federation: str, attempts: list[records.AttemptRecord]) -> list[RoundSummary]:
    closed = [each for each in attempts if each.state is records.AttemptState.CLOSED][: -ESTIMATED_FROM - 1 : -1]
    if not closed:
        return []
    merged = known.store.overview.merged(federation)
    means = {number: both for number, *both in known.store.overview.means(federation, closed[-1].round)}
    return [
        RoundSummary(
            each.round,
            each.attempt,
            (each.closed_at or each.opened_at) - each.opened_at,
            merged.get((each.round, each.attempt), 0),
            *means.get(each.round, (None, None)),
        )
        for each in closed
    ]


def typical_round_s(attempts: list[records.AttemptRecord]) -> float | None:
    """Median duration in seconds of the last closed attempts, from opening to aggregate; None before the first one."""
    closed = [attempt for attempt in attempts if attempt.state is records.AttemptState.CLOSED and attempt.closed_at]
    spans = [(attempt.closed_at or 0.0) - attempt.opened_at for attempt in closed[-ESTIMATED_FROM:]]
    return statistics.median(spans) if spans else None


def _waits_for(record: records.FederationRecord, state: RoundState, service: Service | None) -> str:
    if record.status is records.FederationStatus.CREATED:
        return f"its start: `fedcg federation start {record.id}`"
    if service is None:
        return "a coordinator; none is running this federation"
    if not service.is_connected:
        return "the coordinator's connection to the broker"
    missing = state.policy.quorum - len(state.candidates)
    if missing > 0:
        return f"{missing} more device{'s' if missing > 1 else ''} (quorum {state.policy.quorum})"
    return "further devices, or the delay after a failed attempt"


def _clients(
    known: Known, attempt: records.AttemptRecord, state: RoundState, service: Service | None
) -> list[ClientNow]:
    progress = {} if service is None else service.progress
    updates = known.store.accepted(attempt.federation, attempt.at)
    return [
        _client(person, state, service, progress.get(person.client), updates.get(person.client))
        for person in known.store.participants(attempt.federation, attempt.at)
    ]


def _client(
    person: records.ParticipantRecord,
    state: RoundState,
    service: Service | None,
    progress: DeviceProgress | None,
    update: records.UpdateRecord | None,
) -> ClientNow:
    client = person.client
    if update is not None:
        return ClientNow(
            client, ClientPhase.QUARANTINED if update.weight == 0 else ClientPhase.DELIVERED, update.reason
        )
    if person.state is records.ParticipantState.DECLINED or client in state.declined:
        return ClientNow(client, ClientPhase.DECLINED, person.reason.replace("_", " "))
    if client in state.unapproved:
        return ClientNow(client, ClientPhase.UNAPPROVED, "its owner has not approved the spec")
    if service is not None and service.receiver.is_busy(client):
        return ClientNow(client, ClientPhase.UPLOADING)
    if client not in state.online:
        return ClientNow(client, ClientPhase.SILENT, "it is offline" if service else "no coordinator is running")
    waits = "" if service is None else service.invitations.waits.get(client, "")
    if waits or (person.state is not records.ParticipantState.ACCEPTED and client not in state.accepted):
        return ClientNow(client, ClientPhase.INVITED, waits.replace("_", " "))
    begun, takes_s = person.accepted_at, person.predicted_s
    expected_at = None if begun is None or takes_s is None else begun + takes_s
    training = ClientNow(client, ClientPhase.TRAINING, share=person.share, expected_at=expected_at)
    if progress is None or not progress.steps:
        return training
    done = min(1.0, progress.step / progress.steps)
    return replace(training, reason=progress.phase.replace("_", " "), done=done, ends_at=progress.ends_at)
