"""The state of the agent's protocol, as one frozen value. `state_machine` has the rules that change it."""

from enum import Enum
from typing import Any

from edge_client.session.signals import Wanted
from fedcg.values import Value
from fedcg.wire.messages import schemas

# between retries of a revoked device, because its coordinator may be restored from an earlier backup
REVOKED_RETRY_S = 3600.0
MANIFEST_FIRST_S = 1.0
SILENCE_S = 6.0  # a manifest or download unanswered for this long means that the coordinator lost the session


class TrainerState(str, Enum):
    """The state of the training process."""

    GONE = "gone"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"


class Delivery(Value):
    """An update in the outbox and the repetition of its manifest.

    Attributes:
        update: None until it has been read; until then, `manifest_at` is the time of the next attempt to read it.
        manifest_at: when the manifest is due (again).
        delay_s: pause after the next manifest; doubles up to 30 s.
        silent_since: when the first unanswered manifest was sent.
    """

    round_attempt: schemas.RoundAttempt
    update: schemas.ArtifactRef | None
    manifest_at: float = 0.0
    delay_s: float = MANIFEST_FIRST_S
    silent_since: float | None = None


class SessionState(Value):
    """The whole state of the protocol.

    Attributes:
        epoch: highest coordinator epoch received.
        hello_at: when the next hello is due without a session.
        share, predicted_s: from the last invitation (`Invited`).
        live: whether the aggregate's chunks are currently being broadcast.
        declined: the last declined attempt and the reason; repeated when the invite is repeated.
        obstacle: why no new round is trained now; None if rounds are trained. For the hardware, as of the last invitation. A decline for an
            obstacle is reconsidered when the invite is repeated.
        obstructed: the attempt declined because of the obstacle.
        stored: digests of stored specs and aggregates.
        verdict: the firewall's decision on a spec: (digest, refusal or None).
        is_sealed: whether that spec has sealed parts.
        weighed: the last round attempt with a sealed sum, its image count and the vote.
        sum_at: when keys for that sum are due (again); `sum_ready`: the attempt whose masks are agreed.
        bound_spec: the spec of the private state.
        committed: the last trained round attempt; `committed_epoch` is the epoch of the coordinator that offered it, or a later one.
        superseded: that attempt, if a later coordinator returned to an earlier round because it was restored or lost commits.
        job: the trainer's current work: a round attempt, or the final aggregate's id; `job_spec` is the round's spec.
        finalised: the final aggregate for which a personal model was chosen; `succeeded` is the result.
    """

    federation: str
    device: str
    epoch: int = 0
    up: bool = False
    welcomed: bool = False
    hello_at: float = 0.0
    offer: schemas.Offer | None = None
    finished: schemas.Finished | None = None
    live: bool = False
    invited: schemas.RoundAttempt | None = None
    share: float = 1.0
    predicted_s: float | None = None
    accepted: schemas.RoundAttempt | None = None
    declined: tuple[schemas.RoundAttempt, schemas.DeclineReason] | None = None
    obstacle: schemas.DeclineReason | None = None
    obstructed: schemas.RoundAttempt | None = None
    stored: frozenset[str] = frozenset()
    verdict: tuple[str, schemas.DeclineReason | None] | None = None
    is_sealed: bool = False
    weighed: tuple[schemas.RoundAttempt, int, int] | None = None
    sum_at: float = 0.0
    sum_ready: schemas.RoundAttempt | None = None
    bound_spec: str | None = None
    committed: schemas.RoundAttempt | None = None
    committed_epoch: int = 0
    superseded: schemas.RoundAttempt | None = None
    delivery: Delivery | None = None
    trainer: TrainerState = TrainerState.GONE
    trainer_at: float = 0.0
    job: schemas.RoundAttempt | str | None = None
    job_spec: str | None = None
    deaths: int = 0
    wanted: tuple[Wanted, ...] = ()
    finalised: str | None = None
    succeeded: bool = True
    done: bool = False

    @property
    def offered(self) -> schemas.RoundAttempt | None:
        """The open round attempt, from the last offer."""
        return None if self.offer is None else self.offer.at

    @property
    def trained(self) -> schemas.RoundAttempt | None:
        """The last trained round attempt, unless the coordinator has returned to an earlier round."""
        return None if self.committed == self.superseded else self.committed

    @property
    def release_reason(self) -> str:
        """Why no training process is needed; empty if one is."""
        if self.done:
            return "the federation has ended"
        return "paused" if self.obstacle is schemas.DeclineReason.PAUSED else ""

    def addressed(self, round_attempt: schemas.RoundAttempt = schemas.NO_ATTEMPT) -> dict[str, Any]:
        """The fields of every message of this device, with or without a round attempt."""
        return {
            "federation": self.federation,
            "sender": self.device,
            "recipient": schemas.COORDINATOR,
            "epoch": self.epoch,
            **vars(round_attempt),
        }
