"""Control messages: frozen, strict, discriminated by `kind`, at most 16 KB of JSON inside a signed envelope.

Knows the fields of the messages; not how they are signed (`signing`), carried (`transport`) or answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedcg.wire.errors import MalformedError, TooLargeError, problem_in
from fedcg.wire.messages.conditions import DeclineReason as DeclineReason  # part of the vocabulary of messages
from fedcg.wire.messages.conditions import DeviceCondition, Readings
from fedcg.wire.messages.sum_steps import FromDevice, ToDevice
from fedcg.wire.versions import PROTOCOL_VERSION, Side

MAX_MESSAGE_BYTES = 16 * 1024
MAX_ARTIFACT_BYTES = 512 * 1024 * 1024
MAX_CHUNK_BYTES = 120 * 1024
MAX_KEY_LINKS = 32
COORDINATOR = "coordinator"
EVERYONE = "*"

Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Versions = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...], Field(min_length=1, max_length=8)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Time = Annotated[float, Field(ge=0.0, le=1e11)]


@dataclass(frozen=True, order=True)
class RoundAttempt:
    """A round attempt; ordered by round, then attempt."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}"


NO_ATTEMPT = RoundAttempt(0, 0)
"""The round attempt in messages that concern no round."""


@dataclass(frozen=True)
class OfAttempt:
    """Base of values that are about one round attempt."""

    round: int
    attempt: int

    @property
    def at(self) -> RoundAttempt:
        """The round attempt."""
        return RoundAttempt(self.round, self.attempt)


class Outcome(str, Enum):
    """How the coordinator ends an update; each one ends the outbox entry."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    CLOSED = "closed"
    REJECTED = "rejected"
    CONFLICT = "conflict"


class CohortVerdict(str, Enum):
    """Whether a device's cohort secret equals those of the other devices, by their marks."""

    ALONE = "alone"
    SAME = "same"
    DIFFERENT = "different"


class Carrier(str, Enum):
    """The carrier of a device's artifacts; control messages always go over MQTT."""

    MQTT = "mqtt"
    HTTPS = "https"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(_Strict):
    """Names an artifact by the sha256 of its bytes and gives its exact size."""

    id: Sha256
    size: Annotated[int, Field(ge=1, le=MAX_ARTIFACT_BYTES)]
    chunk_bytes: Annotated[int, Field(ge=256, le=MAX_CHUNK_BYTES)]

    @property
    def chunks(self) -> int:
        """Number of chunks the artifact is cut into."""
        return -(-self.size // self.chunk_bytes)


class _Message(_Strict):
    v: Literal[1] = 1
    federation: Identifier
    sender: Identifier
    recipient: Identifier | Literal["*"]
    epoch: Count = 0
    round: Count = 0
    attempt: Count = 0
    session: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    counter: Count = 0

    @property
    def at(self) -> RoundAttempt:
        """The round attempt that it is about."""
        return RoundAttempt(self.round, self.attempt)


class Offer(_Message):
    """Retained broadcast: the round that is open now."""

    kind: Literal["offer"] = "offer"
    spec: ArtifactRef
    aggregate: ArtifactRef
    rounds: Count
    deadline_at: Time


class Finished(_Message):
    """Retained broadcast on the offer topic: the federation is over; `aggregate` is the final one."""

    kind: Literal["finished"] = "finished"
    spec: ArtifactRef
    aggregate: ArtifactRef


class CoordinatorStatus(_Message):
    """Retained broadcast (and will): whether a coordinator runs, and its epoch."""

    kind: Literal["coordinator_status"] = "coordinator_status"
    online: bool


class KeyLink(_Strict):
    """The coordinator's message key was replaced, once.

    Attributes:
        serial: 1 for the first replacement, then one more each.
        epoch: the coordinator's lease before it.
        old, new: public keys, in hex.
        signature: the old key's, over all of this and the federation.
    """

    serial: Annotated[int, Field(ge=1, le=1 << 53)]
    epoch: Count
    old: Sha256
    new: Sha256
    signature: Signature


class KeyChain(_Message):
    """Retained broadcast: how the coordinator's message key was replaced, oldest first; signed by the newest key."""

    kind: Literal["key_chain"] = "key_chain"
    links: Annotated[tuple[KeyLink, ...], Field(min_length=1, max_length=MAX_KEY_LINKS)]


class DeviceStatus(_Message):
    """The device's agent is connected, or no more; retained, and its will."""

    kind: Literal["device_status"] = "device_status"
    online: bool


class Hello(_Message):
    """A device opens a session.

    Fields of a later version are ignored when its `versions` name one.

    Attributes:
        versions: protocol versions that the device supports.
        cohort: marks its cohort secret, None where it has none.
        heartbeat_s: the longest time in seconds between two of its messages.
        carrier: how its artifacts travel.
        check: it only wants to know whether it is answered; it takes part in nothing and does not count as online.
        key: the coordinator's message key that the device accepts, in hex.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: Literal["hello"] = "hello"
    nonce: Nonce
    versions: Versions
    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+-]{1,32}$")]
    cohort: Nonce | None = None
    heartbeat_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    carrier: Carrier = Carrier.MQTT
    check: Annotated[bool, Field(exclude_if=lambda check: not check)] = False
    key: Annotated[Sha256 | None, Field(exclude_if=lambda key: key is None)] = None

    @model_validator(mode="after")
    def _unknown_fields_are_a_later_versions(self) -> Hello:
        if self.model_extra and max(self.versions) <= PROTOCOL_VERSION:
            raise ValueError("an unknown field")
        return self


TrainingPhase = Literal["wait", "load", "classify", "generate", "shadow-classify", "evaluate", "audit", "train"]
"""What a training process does; a closed set, so that free text can never leave a device. `train`: a step of any other name."""
Steps = Annotated[int, Field(ge=0, le=1 << 31)]


class Heartbeat(_Message):
    """The device is online; sent when its heartbeat interval passed without another message, and more often while it trains.

    Attributes:
        phase: what it does for `round` and `attempt`, where its owner allows `health`; None when it does not train.
        step, steps: how far the phase is.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    phase: TrainingPhase | None = None
    step: Steps = 0
    steps: Steps = 0


class SelfReport(_Message):
    """What a device reports of itself: at the start of a session, when it changes, and every few minutes.

    Attributes:
        boot: drawn by each agent process; two that alternate are two machines with one identity.
        clock: the device's clock in unix seconds, where its owner allows `health`.
        telemetry: of its sensors, where its owner allows `telemetry`; it changes all the time, so it alone is no reason for a report.
    """

    kind: Literal["self_report"] = "self_report"
    boot: Nonce
    clock: Time | None = None
    condition: DeviceCondition = DeviceCondition()
    telemetry: Annotated[Readings | None, Field(exclude_if=lambda readings: readings is None)] = None


class Welcome(_Message):
    """The coordinator answers a hello; both nonces make the session id."""

    kind: Literal["welcome"] = "welcome"
    version: Annotated[int, Field(ge=1, le=1 << 16)]
    device_nonce: Nonce
    nonce: Nonce
    server_time: Time
    cohort: CohortVerdict = CohortVerdict.ALONE


class Refusal(_Message):
    """The coordinator answers a hello that it has no protocol version in common with.

    Attributes:
        versions: those that the coordinator supports.
        device_versions: those of the hello.
        update: the side that is behind.
    """

    kind: Literal["refusal"] = "refusal"
    device_nonce: Nonce
    versions: Versions
    device_versions: Versions
    update: Side


Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Invite(_Message):
    """Asks one device to take part in (round, attempt).

    Attributes:
        cohort: compares its cohort secret with the others'.
        share: of the spec's local steps that it should take (policy `pace`); left out at 1, which agents without the field read.
    """

    kind: Literal["invite"] = "invite"
    cohort: CohortVerdict = CohortVerdict.ALONE
    share: Annotated[Share, Field(exclude_if=lambda share: share == 1.0)] = 1.0


class Accept(_Message):
    """The device takes part.

    Attributes:
        predicted_s: seconds that it expects its update to take, by its last round, where its owner allows `health`.
    """

    kind: Literal["accept"] = "accept"
    predicted_s: Annotated[
        Annotated[float, Field(ge=0.0, le=1e9)] | None, Field(exclude_if=lambda seconds: seconds is None)
    ] = None


class Decline(_Message):
    """The device does not take part; not a failure."""

    kind: Literal["decline"] = "decline"
    reason: DeclineReason


class Manifest(_Message):
    """The device has an update of (round, attempt) to deliver; repeated until a receipt comes."""

    kind: Literal["manifest"] = "manifest"
    artifact: ArtifactRef


class Need(_Message):
    """The receiver of an artifact asks for chunks of it; `ranges` are (first index, count) pairs."""

    kind: Literal["need"] = "need"
    artifact: Sha256
    ranges: Annotated[
        tuple[tuple[Count, Annotated[int, Field(ge=1, le=1 << 20)]], ...], Field(min_length=1, max_length=256)
    ]


class Leave(_Message):
    """The device leaves the federation for good; repeated until it is confirmed."""

    kind: Literal["leave"] = "leave"


class Left(_Message):
    """The coordinator confirms: the device is no member any more, and no round waits for it."""

    kind: Literal["left"] = "left"


class Revoked(_Message):
    """The coordinator has revoked the device that has this message key. It is said outside of a session."""

    kind: Literal["revoked"] = "revoked"
    key: Sha256


class Receipt(_Message):
    """Ends an update, whatever the outcome."""

    kind: Literal["receipt"] = "receipt"
    artifact: Sha256
    outcome: Outcome
    reason: Annotated[str, Field(max_length=300)] = ""


class SumUp(_Message):
    """A device's step of the masked sum of (round, attempt)."""

    kind: Literal["sum_up"] = "sum_up"
    body: Annotated[FromDevice, Field(discriminator="step")]


class SumDown(_Message):
    """The coordinator's step of the masked sum of (round, attempt), to one device."""

    kind: Literal["sum_down"] = "sum_down"
    body: Annotated[ToDevice, Field(discriminator="step")]


InSession = Heartbeat | SelfReport | Accept | Decline | Manifest | Need | Leave | SumUp
"""What a device sends inside a session."""
DeviceMessage = Hello | DeviceStatus | InSession
"""What a device sends."""
AnyMessage = (
    DeviceMessage
    | Offer
    | Finished
    | CoordinatorStatus
    | KeyChain
    | Welcome
    | Refusal
    | Invite
    | Left
    | Revoked
    | Receipt
    | SumDown
)
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="kind")])


def encode(message: AnyMessage) -> bytes:
    """The JSON bytes of a message, the ones that get signed.

    Raises:
        TooLargeError: the message is over 16 KB.
    """
    payload = message.model_dump_json().encode()
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TooLargeError(
            f"a {message.kind} message of {len(payload)} bytes is over the bound of {MAX_MESSAGE_BYTES}"
        )
    return payload


def decode(payload: bytes) -> AnyMessage:
    """The message in `payload`, checked against its strict schema.

    Raises:
        TooLargeError: over 16 KB; nothing was parsed.
        MalformedError: not JSON, an unknown kind, an unknown field or a value out of bounds.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TooLargeError(f"a message of {len(payload)} bytes is over the bound of {MAX_MESSAGE_BYTES}")
    try:
        return _ADAPTER.validate_json(payload, strict=True)
    except ValidationError as error:
        raise MalformedError(f"message field {problem_in(error, 1)}") from error
