"""The signals of the agent's state machine: its input events and output commands. Values only."""

from fedcg.event_log import EventValue
from fedcg.values import Value
from fedcg.wire.messages import schemas


class Event(Value):
    """An input of the agent's state machine."""


Input = Event | schemas.Need | schemas.Receipt | schemas.Finished
"""All inputs of the state machine: events, and the coordinator's messages that are used directly as events."""


class Command(Value):
    """An output of the state machine that the agent executes."""


class _OfAttempt(Value):
    """Base of signals about one round attempt."""

    round_attempt: schemas.RoundAttempt


class Tick(Event):
    """Time has passed."""


class Sending(Event):
    """Time has passed, and chunks of the update are still waiting to be sent, so the coordinator can't have answered yet."""


class LinkChanged(Event):
    """The connection to the broker was established (with subscriptions) or lost."""

    up: bool


class CoordinatorSeen(Event):
    """The coordinator's retained status."""

    epoch: int
    online: bool


class Welcomed(Event):
    """The coordinator answered the hello, and a new session is open."""

    epoch: int
    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    version: int | None = None
    server_time: float | None = None


class HelloRefused(Event):
    """The coordinator supports none of this device's protocol versions. `reason` names the side to update."""

    reason: str


class Offered(Event):
    """A round is open. `live` is False for a retained message: its broadcast of chunks is over."""

    offer: schemas.Offer
    live: bool


class Invited(_OfAttempt, Event):
    """The coordinator invites this device to a round.

    Attributes:
        share: of the spec's local steps.
        predicted_s: predicted duration of training, to report; None: unknown or not allowed to leave.
    """

    cohort: schemas.CohortVerdict = schemas.CohortVerdict.ALONE
    share: float = 1.0
    predicted_s: float | None = None


class ArtifactStored(Event):
    """A download is complete, verified and durable."""

    artifact: str


class ArtifactLost(Event):
    """The aggregate of a commanded job is missing or damaged, so the job did not start."""

    artifact: str


class SessionLost(Event):
    """The session appears to be over: requested chunks are missing for a while, or the broker refuses this device's messages (`refused`)."""

    refused: bool = False


class SpecChecked(Event):
    """The firewall checked a spec. `is_sealed`: the spec has sealed parts."""

    digest: str
    refusal: schemas.DeclineReason | None
    is_sealed: bool = False


class Weighed(_OfAttempt, Event):
    """The images of a round are fixed and counted, and the vote is given. Sent by the training process."""

    images: int
    vote: int = 0


class SumStepped(_OfAttempt, Event, Command):
    """The coordinator sent a step of a round attempt's sealed sum; as a command, answer it."""

    step: schemas.ToDevice
    exchange: schemas.SumExchange = "parts"


class SumReady(_OfAttempt, Event):
    """The round attempt can be trained: its masks are agreed, or it has no sum on this device."""


class TrainerReady(Event):
    """The training process has loaded torch and waits for work. Sent by the training process."""


class TrainerDied(Event):
    """The training process has ended. Its commits were reported before."""


class RoundCommitted(_OfAttempt, Event):
    """A round is trained and saved. Sent by the training process.

    Attributes:
        spec: None: the spec of the current job.
        update: the update in the outbox; None until it has been read.
    """

    spec: str | None = None
    update: schemas.ArtifactRef | None = None


class OutboxFound(_OfAttempt, Event):
    """An update waits in the outbox. `update` is None until it has been read and cut into chunks for the link."""

    update: schemas.ArtifactRef | None = None


class RoundFailed(_OfAttempt, Event):
    """A round can't be trained here. The previous state is unchanged. Sent by the training process.

    Attributes:
        detail: the reason as text, which stays on the device.
    """

    reason: schemas.DeclineReason
    detail: str = ""


class Chosen(Event):
    """The personal model is chosen and exported, or `succeeded` is False. Sent by the training process."""

    aggregate: str
    succeeded: bool


class ObstacleChanged(Event):
    """No new round is trained, for a reason of the hardware or the owner. None: rounds are trained again."""

    reason: schemas.DeclineReason | None


class TrainingAbandoned(Event):
    """The training process was ended at the owner's request. Its commits were reported before."""


class ConsentChanged(Event):
    """The owner approved a spec or revoked an approval, so specs are checked again.

    Attributes:
        is_withheld: the update in the outbox may no longer leave and is recorded as withheld.
    """

    is_withheld: bool = False


class Stopping(Event):
    """The agent is being stopped."""


class Left(Event):
    """The coordinator confirms that this device is no longer a member."""


class Revoked(Event):
    """The coordinator states that it has revoked this device."""


WorkReport = RoundCommitted | RoundFailed | Weighed | Chosen
"""The possible results of the training process's work."""


# Other reports of the training process, which are not events of the state machine.


class Working(Value):
    """A sign of life from the training process, consumed by its handle."""


class Noted(Value):
    """An event that the process has written to the event log, for the agent's log and status."""

    event: dict[str, EventValue]


class SendHello(Command):
    """Open a session. The caller chooses the nonce."""


class Send(Command):
    """Send a control message in the session. Session and counter are added later."""

    message: schemas.AnyMessage


class SendChunks(Command):
    """Publish these chunks of the update in the outbox."""

    update: schemas.ArtifactRef
    ranges: tuple[tuple[int, int], ...]


class Wanted(Value):
    """One download.

    Attributes:
        what: "spec" or "aggregate".
        ask_after_s: silence after which missing chunks are requested; None = only use the broadcast.
    """

    what: str
    ref: schemas.ArtifactRef
    ask_after_s: float | None


class Want(Command):
    """Replace the list of wanted downloads."""

    downloads: tuple[Wanted, ...]


class LoadUpdate(Command):
    """Read the update in the outbox and cut it into chunks for the link. Repeated until it succeeds."""


class CheckSpec(Command):
    """Check a stored spec with the firewall."""

    digest: str


class StartTrainer(Command):
    """Start the training process."""


class ReleaseTrainer(Command):
    """End the training process after its current work, e.g. an export, to free its memory. Sent to the process."""

    reason: str


class WeighRound(_OfAttempt, Command):
    """Fix the images of this round attempt, count them and vote on the aggregate. Sent to the training process."""

    spec: str
    aggregate: str


class AnnounceSum(_OfAttempt, Command):
    """Announce this device's keys for a round attempt's sealed sum, with its image count and vote."""

    images: int
    vote: int = 0


class TrainRound(_OfAttempt, Command):
    """Train this round attempt and commit it. `share`: of the spec's local steps. Sent to the training process."""

    spec: str
    aggregate: str
    share: float = 1.0


class ChooseModel(Command):
    """The federation is over: choose and export the personal model. Sent to the training process."""

    spec: str
    aggregate: str


class RecordDelivery(_OfAttempt, Command):
    """Save durably that an update got its receipt."""

    artifact: str
    outcome: schemas.Outcome
    reason: str


class RecordReason(Command):
    """Save durably what happened to an earlier accepted update."""

    artifact: str
    reason: str


class Note(Command):
    """Write one line to the event log."""

    event: str
    round_attempt: schemas.RoundAttempt
    reason: str = ""


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
