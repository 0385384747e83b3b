"""Facts about the course of a round attempt: the stages of each client with their times, on the coordinator's clock."""

from enum import Enum
from itertools import pairwise

from coordinator.errors import NotFoundError
from coordinator.facts.known import Known
from coordinator.rounds.records import AttemptRecord, AttemptState, ParticipantRecord, ParticipantState, UpdateRecord
from fedcg.values import Value
from fedcg.wire.messages.schemas import Outcome


class Stage(str, Enum):
    """What a client did, in the usual order."""

    INVITED = "invited"
    DOWNLOAD = "download"
    TRAINING = "training"
    BOTH = "download and training"
    UPLOAD = "upload"
    WAITING = "waiting"
    MERGE = "merge"


class StageSpan(Value):
    """One stage of a client from `start` to `end`, both in unix seconds; the stage of an open attempt ends now."""

    stage: Stage
    start: float
    end: float


class ClientTimeline(Value):
    """The stages of one invited client.

    Attributes:
        outcome: of its update; or "declined", "no update yet" or "no update".
        reason: why it declined, or why its update was not merged.
        unknown: which time is missing, and why; empty if none is.
    """

    client: str
    outcome: str
    reason: str
    stages: list[StageSpan]
    unknown: str = ""

    @property
    def seconds(self) -> dict[str, float]:
        """The duration of each stage in seconds."""
        return {each.stage.value: each.end - each.start for each in self.stages}

    @property
    def active_s(self) -> float:
        """Seconds from its invitation until it had delivered, or gave up."""
        return sum(each.end - each.start for each in self.stages if each.stage not in (Stage.WAITING, Stage.MERGE))


class RoundTimeline(Value):
    """The course of one round attempt; times are unix seconds.

    Attributes:
        attempts: number of attempts of this round.
        state: of the attempt; `reason` is why it failed.
        ends_at: when it ended; the present time while it is open.
        clients: slowest first.
    """

    federation: str
    round: int
    attempt: int
    attempts: int
    state: str
    reason: str
    opened_at: float
    ends_at: float
    clients: list[ClientTimeline]


NO_HEALTH = "when its download ended: it does not report its progress (field health)"


def round_timeline(
    known: Known, federation: str, number: int | None = None, attempt: int | None = None
) -> RoundTimeline | None:
    """The course of an attempt: by default the last one, of the last round; None before the first attempt of a federation.

    Raises:
        NotFoundError: there is no such federation, round or attempt.
    """
    every = known.store.attempts(known.federation(federation).id)
    of_round = [each for each in every if each.round == (number or every[-1].round)]
    found = [each for each in of_round if attempt in (None, each.attempt)]
    if not found:
        if number is None and attempt is None:
            return None
        what = f"round {number}" if attempt is None else f"attempt {attempt} of round {number or 'the last round'}"
        raise NotFoundError(f"{what} of {federation} has not been opened yet")
    record = found[-1]
    end = record.closed_at or known.now
    updates = {each.client: each for each in known.store.updates(federation, record.at)}
    people = known.store.participants(federation, record.at)
    clients = [_timeline(record, person, updates.get(person.client), end) for person in people]
    return RoundTimeline(
        federation,
        record.round,
        record.attempt,
        len(of_round),
        record.state.value,
        record.reason if record.state is AttemptState.FAILED else "",
        record.opened_at,
        end,
        sorted(clients, key=lambda each: (-each.active_s, each.client)),
    )


def _timeline(
    attempt: AttemptRecord, person: ParticipantRecord, update: UpdateRecord | None, end: float
) -> ClientTimeline:
    collected_at, unknown = attempt.distilling_at or end, ""
    marks = [(Stage.INVITED, attempt.opened_at)]
    if person.accepted_at is not None:
        trained_from = person.training_at
        if trained_from is None:
            unknown = NO_HEALTH
            marks.append((Stage.BOTH, person.accepted_at))
        else:  # one that reconnected during its training accepted again
            marks += [(Stage.DOWNLOAD, min(person.accepted_at, trained_from)), (Stage.TRAINING, trained_from)]
    gave_up_at = person.declined_at if update is None else None
    if update is not None:
        marks.append((Stage.UPLOAD, update.manifest_at))
        gave_up_at = None if update.outcome is Outcome.ACCEPTED else update.stored_at
        marks += [(Stage.WAITING, update.stored_at)] if gave_up_at is None else []
        if gave_up_at is None and attempt.distilling_at is not None and update.weight != 0:
            marks.append((Stage.MERGE, attempt.distilling_at))
    last = end if marks[-1][0] in (Stage.WAITING, Stage.MERGE) else (gave_up_at or collected_at)
    times = [min(max(at, attempt.opened_at), last) for _, at in marks]
    ends = [max(times[: place + 1]) for place in range(len(times))]  # clocks may be set back
    spans = zip(marks, pairwise([*ends, last]), strict=True)
    stages = [StageSpan(stage, start, stop) for (stage, _), (start, stop) in spans if stop > start]
    if update is not None:
        return ClientTimeline(person.client, update.outcome.value, update.reason, stages, unknown)
    is_open = attempt.state is AttemptState.COLLECTING
    outcome = "declined" if person.state is ParticipantState.DECLINED else "no update yet" if is_open else "no update"
    return ClientTimeline(person.client, outcome, person.reason.replace("_", " "), stages, unknown)
