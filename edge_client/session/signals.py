"""The signals of the agent's state machine: the events that it takes and the commands that it gives. Values only."""

from dataclasses import dataclass

from fedcg.event_log import EventValue
from fedcg.wire.messages import schemas


class Event:
    """Something that happens to the agent, for its state machine."""


Input = Event | schemas.Need | schemas.Receipt | schemas.Finished
"""What the state machine takes: events, and the coordinator's messages that are events as they are."""


class Command:
    """Something that the state machine has the agent do."""


@dataclass(frozen=True)
class Tick(Event):
    """Time went on."""


@dataclass(frozen=True)
class Sending(Event):
    """Time went on, and chunks of the update still wait for the link: the coordinator can't have answered them yet."""


@dataclass(frozen=True)
class LinkChanged(Event):
    """The connection to the broker came up (subscriptions stand) or was lost."""

    up: bool


@dataclass(frozen=True)
class CoordinatorSeen(Event):
    """The coordinator's retained status."""

    epoch: int
    online: bool


@dataclass(frozen=True)
class Welcomed(Event):
    """The coordinator answered the hello; a new session is open."""

    epoch: int
    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    version: int | None = None
    server_time: float | None = None


@dataclass(frozen=True)
class HelloRefused(Event):
    """The coordinator supports none of this device's protocol versions; `reason` names the side to update."""

    reason: str


@dataclass(frozen=True)
class Offered(Event):
    """A round is open. `live` is False for a retained message: its broadcast of chunks is over."""

    offer: schemas.Offer
    live: bool


@dataclass(frozen=True)
class Invited(Event):
    """The coordinator asks this device to take part.

    Attributes:
        share: of the spec's local steps.
        predicted_s: how long that will take here, to be told; None: it is not known, or stays here.
    """

    round_attempt: schemas.RoundAttempt
    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    share: float = 1.0
    predicted_s: float | None = None


@dataclass(frozen=True)
class ArtifactStored(Event):
    """A download is complete, verified and durable."""

    artifact: str


@dataclass(frozen=True)
class ArtifactLost(Event):
    """The aggregate of the job that was just commanded turned out to be damaged and was deleted; the job did not start."""

    artifact: str


@dataclass(frozen=True)
class SessionLost(Event):
    """The session seems to be over: requested chunks have not come for a while, or the broker refuses what this device publishes (`refused`)."""

    refused: bool = False


@dataclass(frozen=True)
class SpecChecked(Event):
    """The firewall checked a spec; `is_sealed`: what it asks for is sealed in part."""

    digest: str
    refusal: schemas.DeclineReason | None
    is_sealed: bool = False


@dataclass(frozen=True)
class Weighed(Event):
    """The images of a round are fixed and counted, and the vote is given; comes from the training process as it is."""

    round_attempt: schemas.RoundAttempt
    images: int
    vote: int = 0


@dataclass(frozen=True)
class SumStepped(Event):
    """The coordinator takes a step of the sealed sum of a round attempt."""

    round_attempt: schemas.RoundAttempt
    step: schemas.ToDevice
    exchange: schemas.SumExchange = "parts"


@dataclass(frozen=True)
class SumReady(Event):
    """The masks of a round attempt are agreed on, or it has no sum on this device: it can be trained."""

    round_attempt: schemas.RoundAttempt


@dataclass(frozen=True)
class TrainerReady(Event):
    """The training process has loaded torch and waits for work; comes from it as it is."""


@dataclass(frozen=True)
class TrainerDied(Event):
    """The training process is gone; its commits were reported before this."""


@dataclass(frozen=True)
class RoundCommitted(Event):
    """A round is trained and durable; comes from the training process as it is.

    Attributes:
        spec: that of the job under way when None.
        update: waits in the outbox; None while it has to be read.
    """

    round_attempt: schemas.RoundAttempt
    spec: str | None = None
    update: schemas.ArtifactRef | None = None


@dataclass(frozen=True)
class OutboxFound(Event):
    """An update waits in the outbox; `update` is None while it has to be read, or cut anew for a new link."""

    round_attempt: schemas.RoundAttempt
    update: schemas.ArtifactRef | None = None


@dataclass(frozen=True)
class RoundFailed(Event):
    """A round can't be trained here; the state before it still stands. Comes from the training process as it is.

    Attributes:
        detail: why, in words that stay on the device.
    """

    round_attempt: schemas.RoundAttempt
    reason: schemas.DeclineReason
    detail: str = ""


@dataclass(frozen=True)
class Chosen(Event):
    """The personal model is chosen and exported, or `succeeded` is False; comes from the training process as it is."""

    aggregate: str
    succeeded: bool


@dataclass(frozen=True)
class ObstacleChanged(Event):
    """No new round is trained, for a reason of the box or of its owner; or again, when it is None."""

    reason: schemas.DeclineReason | None


@dataclass(frozen=True)
class TrainingAbandoned(Event):
    """The training process was ended on the owner's request; its commits were reported before this."""


@dataclass(frozen=True)
class ConsentChanged(Event):
    """The owner approved a spec, or revoked an approval: specs are checked again.

    Attributes:
        is_withheld: the update in the outbox may not leave any more, and is recorded as withheld.
    """

    is_withheld: bool = False


@dataclass(frozen=True)
class Stopping(Event):
    """The agent is about to end: its owner stops it."""


@dataclass(frozen=True)
class Left(Event):
    """The coordinator confirms that this device is no member any more."""


@dataclass(frozen=True)
class Revoked(Event):
    """The coordinator states that it has revoked this device."""


WorkReport = RoundCommitted | RoundFailed | Weighed | Chosen
"""How a piece of work of the training process ends."""


# Other reports of the training process, which are no events of the state machine.


@dataclass(frozen=True)
class Working:
    """A sign of life while it works; ends at the handle."""


@dataclass(frozen=True)
class Noted:
    """An event that the process has written into the event log; the agent's log and status have it too."""

    event: dict[str, EventValue]


@dataclass(frozen=True)
class SendHello(Command):
    """Open a session; the caller chooses the nonce."""


@dataclass(frozen=True)
class Send(Command):
    """Send a control message inside the session; session and counter are still to be stamped."""

    message: schemas.AnyMessage


@dataclass(frozen=True)
class SendChunks(Command):
    """Publish these chunks of the update in the outbox."""

    update: schemas.ArtifactRef
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Wanted:
    """One download.

    Attributes:
        what: "spec" or "aggregate".
        ask_after_s: silence after which missing chunks are asked for; None = only listen to the broadcast.
    """

    what: str
    ref: schemas.ArtifactRef
    ask_after_s: float | None


@dataclass(frozen=True)
class Want(Command):
    """Replace the list of wanted downloads by this one."""

    downloads: tuple[Wanted, ...]


@dataclass(frozen=True)
class LoadUpdate(Command):
    """Read the update in the outbox and cut it for the link; repeated until that works."""


@dataclass(frozen=True)
class CheckSpec(Command):
    """Check a stored spec with the firewall."""

    digest: str


@dataclass(frozen=True)
class StartTrainer(Command):
    """Start the training process."""


@dataclass(frozen=True)
class ReleaseTrainer(Command):
    """End the training process after what it still does, e.g. an export: its memory is freed; goes to the process as it is."""

    reason: str


@dataclass(frozen=True)
class WeighRound(Command):
    """Fix the images of this round attempt, count them and vote on the aggregate; goes to the training process as it is."""

    round_attempt: schemas.RoundAttempt
    spec: str
    aggregate: str


@dataclass(frozen=True)
class AnnounceSum(Command):
    """Announce this device's keys for the sealed sum of a round attempt, with the images that its numbers count for, and its vote."""

    round_attempt: schemas.RoundAttempt
    images: int
    vote: int = 0


@dataclass(frozen=True)
class AnswerSum(Command):
    """Answer a step of the coordinator's in the sealed sum of a round attempt."""

    round_attempt: schemas.RoundAttempt
    step: schemas.ToDevice
    exchange: schemas.SumExchange = "parts"


@dataclass(frozen=True)
class TrainRound(Command):
    """Train this round attempt and commit it; goes to the training process as it is. `share`: of the spec's local steps."""

    round_attempt: schemas.RoundAttempt
    spec: str
    aggregate: str
    share: float = 1.0


@dataclass(frozen=True)
class ChooseModel(Command):
    """The federation is over: choose and export the personal model; goes to the training process as it is."""

    spec: str
    aggregate: str


@dataclass(frozen=True)
class RecordDelivery(Command):
    """Store durably that an update got its receipt."""

    round_attempt: schemas.RoundAttempt
    artifact: str
    outcome: schemas.Outcome
    reason: str


@dataclass(frozen=True)
class RecordReason(Command):
    """Store durably what became of an update that was accepted before."""

    artifact: str
    reason: str


@dataclass(frozen=True)
class Note(Command):
    """Write one line of the event log, for the operator."""

    event: str
    round_attempt: schemas.RoundAttempt
    reason: str = ""


@dataclass(frozen=True)
class Done(Command):
    """The federation is over, and this device has done what is left to do, or failed at it."""

    succeeded: bool


Work = WeighRound | TrainRound | ChooseModel
TrainerCommand = Work | ReleaseTrainer


def given_up(command: Command) -> Event | None:
    """The event that stands for a command that could not be carried out; None for one that is repeated, or that a message asks for again."""
    if isinstance(command, TrainRound | WeighRound | AnnounceSum):
        return RoundFailed(command.round_attempt, schemas.DeclineReason.TRAINING_FAILED)
    if isinstance(command, ChooseModel):
        return Chosen(command.aggregate, succeeded=False)
    return TrainerDied() if isinstance(command, StartTrainer) else None
