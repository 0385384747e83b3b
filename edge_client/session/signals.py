"""The signals of the agent's state machine: its input events and output commands. Values only."""

from dataclasses import dataclass

from fedcg.event_log import EventValue
from fedcg.wire.messages import schemas


class Event:
    """An input of the agent's state machine."""


Input = Event | schemas.Need | schemas.Receipt | schemas.Finished
"""All inputs of the state machine: events, and the coordinator's messages that are used directly as events."""


class Command:
    """An output of the state machine that the agent executes."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class Sending(Event):
    """Time has passed, and chunks of the update are still waiting to be sent, so the coordinator can't have answered yet."""


@dataclass(frozen=True)
class LinkChanged(Event):
    """The connection to the broker was established (with subscriptions) or lost."""

    up: bool


@dataclass(frozen=True)
class CoordinatorSeen(Event):
    """The coordinator's retained status."""

    epoch: int
    online: bool


@dataclass(frozen=True)
class Welcomed(Event):
    """The coordinator answered the hello, and a new session is open."""

    epoch: int
    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    version: int | None = None
    server_time: float | None = None


@dataclass(frozen=True)
class HelloRefused(Event):
    """The coordinator supports none of this device's protocol versions. `reason` names the side to update."""

    reason: str


@dataclass(frozen=True)
class Offered(Event):
    """A round is open. `live` is False for a retained message: its broadcast of chunks is over."""

    offer: schemas.Offer
    live: bool


@dataclass(frozen=True)
class Invited(Event):
    """The coordinator invites this device to a round.

    Attributes:
        share: of the spec's local steps.
        predicted_s: predicted duration of training, to report; None: unknown or not allowed to leave.
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
    """The aggregate of a commanded job is missing or damaged, so the job did not start."""

    artifact: str


@dataclass(frozen=True)
class SessionLost(Event):
    """The session appears to be over: requested chunks are missing for a while, or the broker refuses this device's messages (`refused`)."""

    refused: bool = False


@dataclass(frozen=True)
class SpecChecked(Event):
    """The firewall checked a spec. `is_sealed`: the spec has sealed parts."""

    digest: str
    refusal: schemas.DeclineReason | None
    is_sealed: bool = False


@dataclass(frozen=True)
class Weighed(Event):
    """The images of a round are fixed and counted, and the vote is given. Sent by the training process."""

    round_attempt: schemas.RoundAttempt
    images: int
    vote: int = 0


@dataclass(frozen=True)
class SumStepped(Event):
    """The coordinator sent a step of a round attempt's sealed sum."""

    round_attempt: schemas.RoundAttempt
    step: schemas.ToDevice
    exchange: schemas.SumExchange = "parts"


@dataclass(frozen=True)
class SumReady(Event):
    """The round attempt can be trained: its masks are agreed, or it has no sum on this device."""

    round_attempt: schemas.RoundAttempt


@dataclass(frozen=True)
class TrainerReady(Event):
    """The training process has loaded torch and waits for work. Sent by the training process."""


@dataclass(frozen=True)
class TrainerDied(Event):
    """The training process has ended. Its commits were reported before."""


@dataclass(frozen=True)
class RoundCommitted(Event):
    """A round is trained and saved. Sent by the training process.

    Attributes:
        spec: None: the spec of the current job.
        update: the update in the outbox; None until it has been read.
    """

    round_attempt: schemas.RoundAttempt
    spec: str | None = None
    update: schemas.ArtifactRef | None = None


@dataclass(frozen=True)
class OutboxFound(Event):
    """An update waits in the outbox. `update` is None until it has been read and cut into chunks for the link."""

    round_attempt: schemas.RoundAttempt
    update: schemas.ArtifactRef | None = None


@dataclass(frozen=True)
class RoundFailed(Event):
    """A round can't be trained here. The previous state is unchanged. Sent by the training process.

    Attributes:
        detail: the reason as text, which stays on the device.
    """

    round_attempt: schemas.RoundAttempt
    reason: schemas.DeclineReason
    detail: str = ""


@dataclass(frozen=True)
class Chosen(Event):
    """The personal model is chosen and exported, or `succeeded` is False. Sent by the training process."""

    aggregate: str
    succeeded: bool


@dataclass(frozen=True)
class ObstacleChanged(Event):
    """No new round is trained, for a reason of the hardware or the owner. None: rounds are trained again."""

    reason: schemas.DeclineReason | None


@dataclass(frozen=True)
class TrainingAbandoned(Event):
    """The training process was ended at the owner's request. Its commits were reported before."""


@dataclass(frozen=True)
class ConsentChanged(Event):
    """The owner approved a spec or revoked an approval, so specs are checked again.

    Attributes:
        is_withheld: the update in the outbox may no longer leave and is recorded as withheld.
    """

    is_withheld: bool = False


@dataclass(frozen=True)
class Stopping(Event):
    """The agent is being stopped."""


@dataclass(frozen=True)
class Left(Event):
    """The coordinator confirms that this device is no longer a member."""


@dataclass(frozen=True)
class Revoked(Event):
    """The coordinator states that it has revoked this device."""


WorkReport = RoundCommitted | RoundFailed | Weighed | Chosen
"""The possible results of the training process's work."""


# Other reports of the training process, which are not events of the state machine.


@dataclass(frozen=True)
class Working:
    """A sign of life from the training process, consumed by its handle."""


@dataclass(frozen=True)
class Noted:
    """An event that the process has written to the event log, for the agent's log and status."""

    event: dict[str, EventValue]


@dataclass(frozen=True)
class SendHello(Command):
    """Open a session. The caller chooses the nonce."""


@dataclass(frozen=True)
class Send(Command):
    """Send a control message in the session. Session and counter are added later."""

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
        ask_after_s: silence after which missing chunks are requested; None = only use the broadcast.
    """

    what: str
    ref: schemas.ArtifactRef
    ask_after_s: float | None


@dataclass(frozen=True)
class Want(Command):
    """Replace the list of wanted downloads."""

    downloads: tuple[Wanted, ...]


@dataclass(frozen=True)
class LoadUpdate(Command):
    """Read the update in the outbox and cut it into chunks for the link. Repeated until it succeeds."""


@dataclass(frozen=True)
class CheckSpec(Command):
    """Check a stored spec with the firewall."""

    digest: str


@dataclass(frozen=True)
class StartTrainer(Command):
    """Start the training process."""


@dataclass(frozen=True)
class ReleaseTrainer(Command):
    """End the training process after its current work, e.g. an export, to free its memory. Sent to the process."""

    reason: str


@dataclass(frozen=True)
class WeighRound(Command):
    """Fix the images of this round attempt, count them and vote on the aggregate. Sent to the training process."""

    round_attempt: schemas.RoundAttempt
    spec: str
    aggregate: str


@dataclass(frozen=True)
class AnnounceSum(Command):
    """Announce this device's keys for a round attempt's sealed sum, with its image count and vote."""

    round_attempt: schemas.RoundAttempt
    images: int
    vote: int = 0


@dataclass(frozen=True)
class AnswerSum(Command):
    """Answer the coordinator's step in a round attempt's sealed sum."""

    round_attempt: schemas.RoundAttempt
    step: schemas.ToDevice
    exchange: schemas.SumExchange = "parts"


@dataclass(frozen=True)
class TrainRound(Command):
    """Train this round attempt and commit it. `share`: of the spec's local steps. Sent to the training process."""

    round_attempt: schemas.RoundAttempt
    spec: str
    aggregate: str
    share: float = 1.0


@dataclass(frozen=True)
class ChooseModel(Command):
    """The federation is over: choose and export the personal model. Sent to the training process."""

    spec: str
    aggregate: str


@dataclass(frozen=True)
class RecordDelivery(Command):
    """Save durably that an update got its receipt."""

    round_attempt: schemas.RoundAttempt
    artifact: str
    outcome: schemas.Outcome
    reason: str


@dataclass(frozen=True)
class RecordReason(Command):
    """Save durably what happened to an earlier accepted update."""

    artifact: str
    reason: str


@dataclass(frozen=True)
class Note(Command):
    """Write one line to the event log."""

    event: str
    round_attempt: schemas.RoundAttempt
    reason: str = ""


@dataclass(frozen=True)
class Done(Command):
    """The federation is over, and this device has finished its remaining work or failed."""

    succeeded: bool


Work = WeighRound | TrainRound | ChooseModel
TrainerCommand = Work | ReleaseTrainer


def given_up(command: Command) -> Event | None:
    """The event for a command that could not be executed; None if the command is repeated or a message requests it again."""
    if isinstance(command, TrainRound | WeighRound | AnnounceSum):
        return RoundFailed(command.round_attempt, schemas.DeclineReason.TRAINING_FAILED)
    if isinstance(command, ChooseModel):
        return Chosen(command.aggregate, succeeded=False)
    return TrainerDied() if isinstance(command, StartTrainer) else None
