"""The commands that the agent's state machine gives. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.session.events import Chosen, Event, RoundFailed, TrainerDied
from fedcg.wire.messages.schemas import AnyMessage, ArtifactRef, DeclineReason, Outcome, RoundAttempt, ToDevice


@dataclass(frozen=True)
class SendHello:
    """Open a session; the caller chooses the nonce."""


@dataclass(frozen=True)
class Send:
    """Send a control message inside the session; session and counter are still to be stamped."""

    message: AnyMessage


@dataclass(frozen=True)
class SendChunks:
    """Publish these chunks of the update in the outbox."""

    update: ArtifactRef
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Wanted:
    """One download.

    Attributes:
        what: "spec" or "aggregate".
        ask_after_s: silence after which missing chunks are asked for; None = only listen to the broadcast.
    """

    what: str
    ref: ArtifactRef
    ask_after_s: float | None


@dataclass(frozen=True)
class Want:
    """Replace the list of wanted downloads by this one."""

    downloads: tuple[Wanted, ...]


@dataclass(frozen=True)
class LoadUpdate:
    """Read the update in the outbox and cut it for the link; repeated until that works."""


@dataclass(frozen=True)
class CheckSpec:
    """Check a stored spec with the firewall."""

    digest: str


@dataclass(frozen=True)
class StartTrainer:
    """Start the training process."""


@dataclass(frozen=True)
class ReleaseTrainer:
    """End the training process after what it still does, e.g. an export: its memory is freed; goes to the process as it is."""

    reason: str


@dataclass(frozen=True)
class WeighRound:
    """Fix the images of this round attempt and count them; goes to the training process as it is."""

    round_attempt: RoundAttempt
    spec: str


@dataclass(frozen=True)
class AnnounceSum:
    """Announce this device's keys for the masked sum of a round attempt, with the images that its numbers count for."""

    round_attempt: RoundAttempt
    spec: str
    images: int


@dataclass(frozen=True)
class AnswerSum:
    """Answer a step of the coordinator's in the masked sum of a round attempt."""

    round_attempt: RoundAttempt
    step: ToDevice


@dataclass(frozen=True)
class TrainRound:
    """Train this round attempt and commit it; goes to the training process as it is. `share`: of the spec's local steps."""

    round_attempt: RoundAttempt
    spec: str
    aggregate: str
    share: float = 1.0


@dataclass(frozen=True)
class ChooseModel:
    """The federation is over: choose and export the personal model; goes to the training process as it is."""

    spec: str
    aggregate: str


@dataclass(frozen=True)
class RecordDelivery:
    """Store durably that an update got its receipt."""

    round_attempt: RoundAttempt
    artifact: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class RecordReason:
    """Store durably what became of an update that was accepted before."""

    artifact: str
    reason: str


@dataclass(frozen=True)
class Note:
    """Write one line of the event log, for the operator."""

    event: str
    round_attempt: RoundAttempt
    reason: str = ""


@dataclass(frozen=True)
class Done:
    """The purpose of this session is fulfilled, or can't be."""

    succeeded: bool


Command = (
    SendHello
    | Send
    | SendChunks
    | Want
    | LoadUpdate
    | CheckSpec
    | StartTrainer
    | ReleaseTrainer
    | WeighRound
    | AnnounceSum
    | AnswerSum
    | TrainRound
    | ChooseModel
    | RecordDelivery
    | RecordReason
    | Note
    | Done
)

Work = WeighRound | TrainRound | ChooseModel
TrainerCommand = Work | ReleaseTrainer


def given_up(command: Command) -> Event | None:
    """The event that stands for a command that could not be carried out; None for one that is repeated, or that a message asks for again."""
    if isinstance(command, TrainRound | WeighRound | AnnounceSum):
        return RoundFailed(command.round_attempt, DeclineReason.TRAINING_FAILED)
    if isinstance(command, ChooseModel):
        return Chosen(command.aggregate, succeeded=False)
    return TrainerDied() if isinstance(command, StartTrainer) else None
