"""Schemas of control messages: frozen, strict, discriminated by `kind`, at most 16 KB of JSON.

They include the conditions of a device, the steps of a sealed sum, and protocol versions. All values are codes from closed sets, never a
device's free text. This module must not know signatures (`envelopes`), topics or answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from fedcg.values import Value
from fedcg.wire.errors import MalformedError, TooLargeError, problem_in
from fedcg.wire.parts import MAX_SUM_DEVICES, TAGS, Part, Share, is_absent

DoctorCheck = Literal["clock", "disk", "encrypted disk", "keys", "certificate", "data", "cohort secret", "training"]
"""The checks of `fedcg doctor` that concern the device itself; a closed set, so that a path or a file name can never leave it."""
FormName = Literal["fp32", "fp16", "int8"]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Versions = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...], Field(min_length=1, max_length=8)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Time = Annotated[float, Field(ge=0.0, le=1e11)]
Celsius = Annotated[float, Field(ge=-273.15, le=1000.0)]


class DeclineReason(str, Enum):
    """Why a device declines a round; a closed set, so that free text can never leave a device."""

    UPLOAD_NOT_ALLOWED = "upload_not_allowed"
    REPORT_NOT_ALLOWED = "report_not_allowed"
    NOT_ELIGIBLE = "not_eligible"
    NO_DATA = "no_data"
    UNKNOWN_METHOD = "unknown_method"
    SPEC_REFUSED = "spec_refused"
    TRAINING_FAILED = "training_failed"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"
    WITHHELD = "withheld"
    NO_SUM = "no_sum"
    PAUSED = "paused"
    NEEDS_APPROVAL = "needs_approval"
    DAILY_LIMIT = "daily_limit"
    # Conditions of the device, if its owner allows `health` (otherwise NOT_ELIGIBLE).
    RESERVED = "reserved"
    HOT = "hot"
    THROTTLED = "throttled"
    ON_BATTERY = "on_battery"
    QUIET_HOURS = "quiet_hours"
    LOW_DISK = "low_disk"
    LOW_MEMORY = "low_memory"
    METERED = "metered"
    NO_TIME = "no_time"

    @property
    def passes(self) -> bool:
        """Whether the reason may end while the attempt is open. A round that needs the device waits for that."""
        return self.value in _PASSING

    @property
    def needs_owner(self) -> bool:
        """Whether the reason ends as soon as the device's owner approves the spec."""
        return self in (self.UPLOAD_NOT_ALLOWED, self.REPORT_NOT_ALLOWED, self.NEEDS_APPROVAL)


_PASSING = frozenset(
    {"interrupted", "reserved", "hot", "throttled", "on_battery", "quiet_hours"} | {"low_disk", "low_memory", "metered"}
)


class _Strict(BaseModel, frozen=True, extra="forbid", ser_json_bytes="hex"):
    """Base of models without unknown fields; bytes are hex in JSON."""


class DoctorFinding(_Strict):
    """A check that did not pass: "warning" (it works, but needs attention) or "failed"."""

    check: DoctorCheck
    state: Literal["warning", "failed"]


class FormEvidence(_Strict):
    """One form of an exported model, as the device's export measured it on held-out images.

    Attributes:
        size: bytes of its file; None if it was tried and not kept.
        latency_ms: median milliseconds of one prediction at batch 1.
        accuracy: share of the images that it classifies correctly.
        agreement: share of the images for which it predicts the same class as the exported model.
        images: their number.
    """

    name: FormName
    size: Count | None = None
    latency_ms: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    accuracy: Share | None = None
    agreement: Share | None = None
    images: Count = 0


ModelVersion = Annotated[str, Field(pattern=r"^\d{1,9}$")]


class ServedModel(_Strict):
    """The exported model in use.

    Attributes:
        version: its number on the device.
        round: that its weights come from.
        serves: the form in use.
        accuracy: share of the device's test images that the exported model classifies correctly.
        before: the same for the version that was in use before.
        forms: all forms that were tried.
        answers: the version that still answers, while this one is compared with it.
        returned: the version that was rolled back last, and `because` of what.
    """

    version: ModelVersion
    round: Count
    serves: FormName
    accuracy: Share | None = None
    before: Share | None = None
    forms: Annotated[tuple[FormEvidence, ...], Field(max_length=8)] = ()
    answers: ModelVersion | None = None
    returned: ModelVersion | None = None
    because: Literal["errors", "drift", "latency", "incomparable", "operator"] | None = None


class Readings(_Strict):
    """Readings of a device's sensors; None (never zero) without such a sensor.

    Attributes:
        temperature_c: of the zone that is closest to its limit, and `limit_c` that limit, in °C.
        watts: power of the device, or of its GPU if only that is measured.
        battery: charge of the emptiest battery or UPS, a share.
        on_mains: whether a mains or USB supply delivers power.
        slowed_by: what lowers its clock rates now; empty: nothing.
        free_memory, free_disk: bytes, within the limits of its control group, and on the disk of the private store.
    """

    temperature_c: Celsius | None = None
    limit_c: Celsius | None = None
    watts: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    battery: Share | None = None
    on_mains: bool | None = None
    slowed_by: Annotated[tuple[Literal["software", "hardware"], ...], Field(max_length=2)] = ()
    free_memory: Count | None = None
    free_disk: Count | None = None


class DeviceCondition(_Strict):
    """A device's report about itself; None if its owner does not allow it, or it is not known yet.

    Attributes:
        findings: of the device's doctor, if the owner allows `health`.
        model: if the owner allows `model`, and a model was exported.
        paused: True while the owner has paused the device, if the owner allows `health`.
    """

    findings: Annotated[tuple[DoctorFinding, ...], Field(max_length=16)] | None = None
    model: ServedModel | None = None
    paused: Annotated[Literal[True] | None, Field(exclude_if=is_absent)] = None


MAX_SUM_GROUPS = 32
SumExchange = Literal["weights", "parts"]
"""The content of a sum: the devices' weights, or parts of their updates."""


def _from_hex(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch("([0-9a-f]{2})*", value):
        raise ValueError("must be bytes in hex, of 0-9 and a-f")
    return bytes.fromhex(value) if isinstance(value, str) else value


Hex = Annotated[bytes, BeforeValidator(_from_hex)]
"""Bytes that are lower-case hex in JSON, so that each value has one form. The model writes them with `ser_json_bytes="hex"`."""
_SumKey = Annotated[Hex, Field(min_length=32, max_length=32)]
_SumSignature = Annotated[Hex, Field(min_length=64, max_length=64)]
_SumShare = Annotated[Hex, Field(min_length=16, max_length=16)]
_Sealed = Annotated[Hex, Field(min_length=48, max_length=48)]
_Weight = Annotated[Hex, Field(min_length=4 * (1 + TAGS), max_length=4 * (1 + TAGS))]
_Few = Field(max_length=MAX_SUM_DEVICES)


class SumKeys(_Strict):
    """A device's announcement before the sum of a round attempt, derived from its secrets.

    Attributes:
        cipher, mask: X25519 public keys.
        mark: commitment to its own mask.
        weight: of its numbers.
        vote: bits that all members see; the method defines their meaning.
        signature: by its key for sums.
        key: that key, for the coordinator; the members have it from their owners.
    """

    step: Literal["keys"] = "keys"
    cipher: _SumKey
    mask: _SumKey
    mark: _SumKey
    weight: Annotated[int, Field(ge=1, le=1 << 24)]
    vote: Annotated[int, Field(ge=0, le=255)] = 0
    signature: _SumSignature
    key: Annotated[_SumKey | None, Field(exclude_if=is_absent)] = None


class SumNumbers(_Strict):
    """A device's masked numbers for a sum outside an update."""

    step: Literal["numbers"] = "numbers"
    numbers: _Weight


class SumShares(_Strict):
    """A device deals its shares, sealed for each member."""

    step: Literal["shares"] = "shares"
    sealed: Annotated[dict[Identifier, _Sealed], _Few]


class SumSigned(_Strict):
    """A device signs the list of survivors."""

    step: Literal["signed"] = "signed"
    signature: _SumSignature


class SumRevealed(_Strict):
    """A device reveals its shares that open the sum: of a survivor's own mask, or of a lost device's pair masks."""

    step: Literal["revealed"] = "revealed"
    shares: Annotated[dict[Identifier, _SumShare], _Few]


class SumObstacle(str, Enum):
    """Why a device is not in a sum, as far as the coordinator may know."""

    BLOCKED = "blocked"
    LEAST_SUM = "least_sum"
    ROSTER = "roster"
    SHOWN = "shown"
    OTHER = "other"


class SumRefused(_Strict):
    """A device refuses the sum, or a further step of it."""

    step: Literal["refused"] = "refused"
    why: SumObstacle


class SumMembers(_Strict):
    """The members of the sum with their announcements; `total`: the sum of the weights of all groups."""

    step: Literal["members"] = "members"
    announced: Annotated[dict[Identifier, SumKeys], _Few]
    total: Annotated[int, Field(ge=0, le=1 << 53)] = 0


class SumDealt(_Strict):
    """The shares for the recipient, by the device that dealt them. These devices are the peers of its pair masks."""

    step: Literal["dealt"] = "dealt"
    sealed: Annotated[dict[Identifier, _Sealed], _Few]


class SumSurvivors(_Strict):
    """The devices whose masked numbers arrived; asks for a signature."""

    step: Literal["survivors"] = "survivors"
    names: Annotated[tuple[Identifier, ...], _Few]


class SumOpening(_Strict):
    """The signatures over the list of survivors; asks for shares."""

    step: Literal["opening"] = "opening"
    names: Annotated[tuple[Identifier, ...], _Few]
    signatures: Annotated[dict[Identifier, _SumSignature], _Few]


class SumOpened(_Strict):
    """The sum of one group as the coordinator has it, still behind the cohort's masks of these devices.

    Attributes:
        groups: the number of groups; `group` is the number of this one, from 0.
    """

    step: Literal["opened"] = "opened"
    group: Annotated[int, Field(ge=0, lt=MAX_SUM_GROUPS)]
    groups: Annotated[int, Field(ge=1, le=MAX_SUM_GROUPS)]
    numbers: _Weight
    digest: Sha256
    names: Annotated[tuple[Identifier, ...], _Few]


class SumOff(_Strict):
    """This attempt has no sum: the recipient continues without one."""

    step: Literal["off"] = "off"


class SealedSum(_Strict):
    """Data in an aggregate with which the cohort removes its masks from a sum that only it can read.

    Attributes:
        parts: the parts whose numbers were sent together, sorted.
        digest: of the announcements of its members.
        names: the devices whose numbers are in it.
    """

    round: Count
    attempt: Count
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=8)]
    digest: Sha256
    names: Annotated[tuple[Identifier, ...], _Few]


FromDevice = SumKeys | SumShares | SumNumbers | SumSigned | SumRevealed | SumRefused
ToDevice = SumMembers | SumDealt | SumSurvivors | SumOpening | SumOpened | SumOff


FIRST_SERVED = 2
"""A coordinator of version N serves N and N-1, from version 2 on: version 1 was never deployed."""
PROTOCOL_VERSION = 2
SPOKEN: tuple[int, ...] = tuple(range(max(FIRST_SERVED, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 1))
Side = Literal["device", "coordinator"]


def agree(device: Sequence[int]) -> int | None:
    """The highest version that a device and this program support, or None."""
    return max(set(device) & set(SPOKEN), default=None)


def outdated(device: Sequence[int], coordinator: Sequence[int]) -> Side:
    """The side to update if both have no version in common: the one with the older newest version."""
    return "device" if max(device) < max(coordinator) else "coordinator"


def explain_versions(device: Sequence[int], coordinator: Sequence[int]) -> str:
    """Why two sides have no version in common, and what to do, for people."""
    ours, theirs = (", ".join(map(str, sorted(side))) for side in (device, coordinator))
    what = "agent on this device" if outdated(device, coordinator) == "device" else "coordinator"
    return f"the device supports protocol version {ours}, the coordinator {theirs}: update the {what}"


MAX_MESSAGE_BYTES = 16 * 1024
MAX_ARTIFACT_BYTES = 512 * 1024 * 1024
MAX_CHUNK_BYTES = 120 * 1024
MAX_KEY_LINKS = 32
COORDINATOR = "coordinator"
EVERYONE = "*"


@dataclass(frozen=True, order=True)
class RoundAttempt:
    """A round attempt; ordered by round, then attempt. `vars` of it are its fields in an event, a row or a message."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}"


NO_ATTEMPT = RoundAttempt(0, 0)
"""The round attempt in messages that concern no round."""


class OfAttempt(Value):
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
    """Whether a device's cohort secret equals those of the other devices, by their marks; lacking: some devices have none."""

    ALONE = "alone"
    SAME = "same"
    LACKING = "lacking"
    DIFFERENT = "different"


class Carrier(str, Enum):
    """The carrier of a device's artifacts; control messages always go over MQTT."""

    MQTT = "mqtt"
    HTTPS = "https"


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
        """The round attempt of the message."""
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
        serial: 1 for the first replacement, then counting up.
        epoch: the coordinator's lease before the replacement.
        old, new: public keys, in hex.
        signature: by the old key, over these fields and the federation.
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
    """Whether the device's agent is connected; retained, and its will."""

    kind: Literal["device_status"] = "device_status"
    online: bool


class Hello(_Message, frozen=True, extra="allow"):
    """A device opens a session.

    Unknown fields are ignored if `versions` names a later version.

    Attributes:
        versions: protocol versions that the device supports.
        cohort: mark of its cohort secret; None without one.
        heartbeat_s: the longest time in seconds between two of its messages.
        carrier: how its artifacts travel.
        check: the device only tests for an answer. It joins no round and does not count as online.
        key: the coordinator's message key that the device accepts, in hex.
    """

    kind: Literal["hello"] = "hello"
    nonce: Nonce
    versions: Versions
    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+-]{1,32}$")]
    cohort: Nonce | None = None
    heartbeat_s: Annotated[int, Field(ge=1, le=86_400)] | None = None
    carrier: Carrier = Carrier.MQTT
    check: Annotated[bool, Field(exclude_if=lambda check: not check)] = False
    key: Annotated[Sha256 | None, Field(exclude_if=is_absent)] = None

    @model_validator(mode="after")
    def _unknown_fields_are_a_later_versions(self) -> Hello:
        if self.model_extra and max(self.versions) <= PROTOCOL_VERSION:
            raise ValueError("an unknown field")
        return self


TrainingPhase = Literal["wait", "load", "classify", "generate", "shadow-classify", "evaluate", "audit", "train"]
"""The activity of a training process; a closed set, so that free text can never leave a device. `train`: any step with another name."""
Steps = Annotated[int, Field(ge=0, le=1 << 31)]


class Heartbeat(_Message):
    """The device is online; sent when a heartbeat interval passed without another message, and more often during training.

    Attributes:
        phase: the current activity for `round` and `attempt`, if its owner allows `health`; None when it does not train.
        step, steps: progress of the phase.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    phase: TrainingPhase | None = None
    step: Steps = 0
    steps: Steps = 0


class SelfReport(_Message):
    """A device's report about itself: at the start of a session, at a change, and every few minutes.

    Attributes:
        boot: random, drawn by each agent process; two alternating values mean two machines with one identity.
        clock: the device's clock in unix seconds, if its owner allows `health`.
        telemetry: sensor readings, if its owner allows `telemetry`. They change constantly, so a change of them alone causes no report.
    """

    kind: Literal["self_report"] = "self_report"
    boot: Nonce
    clock: Time | None = None
    condition: DeviceCondition = DeviceCondition()
    telemetry: Annotated[Readings | None, Field(exclude_if=is_absent)] = None


class Welcome(_Message):
    """The coordinator's answer to a hello; the session id is derived from both nonces."""

    kind: Literal["welcome"] = "welcome"
    version: Annotated[int, Field(ge=1, le=1 << 16)]
    device_nonce: Nonce
    nonce: Nonce
    server_time: Time
    cohort: CohortVerdict = CohortVerdict.ALONE


class Refusal(_Message):
    """The coordinator's answer to a hello without a common protocol version.

    Attributes:
        versions: that the coordinator supports.
        device_versions: from the hello.
        update: the side to update.
    """

    kind: Literal["refusal"] = "refusal"
    device_nonce: Nonce
    versions: Versions
    device_versions: Versions
    update: Side


class Invite(_Message):
    """Invites one device to (round, attempt).

    Attributes:
        cohort: comparison of its cohort secret with the others'.
        share: of the spec's local steps that the device should take (policy `pace`); omitted at 1, the value for agents without the field.
    """

    kind: Literal["invite"] = "invite"
    cohort: CohortVerdict = CohortVerdict.ALONE
    share: Annotated[float, Field(gt=0.0, le=1.0, exclude_if=lambda share: share == 1.0)] = 1.0


class Accept(_Message):
    """The device accepts the invitation.

    Attributes:
        predicted_s: expected seconds until its update, from its last round, if its owner allows `health`.
    """

    kind: Literal["accept"] = "accept"
    predicted_s: Annotated[Annotated[float, Field(ge=0.0, le=1e9)] | None, Field(exclude_if=is_absent)] = None


class Decline(_Message):
    """The device declines the round; not a failure."""

    kind: Literal["decline"] = "decline"
    reason: DeclineReason


class Manifest(_Message):
    """The device has an update of (round, attempt) to deliver; repeated until a receipt arrives."""

    kind: Literal["manifest"] = "manifest"
    artifact: ArtifactRef


class Need(_Message):
    """The receiver of an artifact requests chunks of it; `ranges` are (first index, count) pairs."""

    kind: Literal["need"] = "need"
    artifact: Sha256
    ranges: Annotated[
        tuple[tuple[Count, Annotated[int, Field(ge=1, le=1 << 20)]], ...], Field(min_length=1, max_length=256)
    ]


class Leave(_Message):
    """The device leaves the federation for good; repeated until it is confirmed."""

    kind: Literal["leave"] = "leave"


class Left(_Message):
    """The coordinator confirms: the device is no longer a member, and no round waits for it."""

    kind: Literal["left"] = "left"


class Revoked(_Message):
    """The coordinator has revoked the device with this message key. Sent outside of a session."""

    kind: Literal["revoked"] = "revoked"
    key: Sha256


class Receipt(_Message):
    """Ends an update, whatever the outcome."""

    kind: Literal["receipt"] = "receipt"
    artifact: Sha256
    outcome: Outcome
    reason: Annotated[str, Field(max_length=300)] = ""


class SumUp(_Message):
    """A device's step of the sealed sum of (round, attempt)."""

    kind: Literal["sum_up"] = "sum_up"
    exchange: SumExchange = "parts"
    body: Annotated[FromDevice, Field(discriminator="step")]


class SumDown(_Message):
    """The coordinator's step of the sealed sum of (round, attempt), to one device."""

    kind: Literal["sum_down"] = "sum_down"
    exchange: SumExchange = "parts"
    body: Annotated[ToDevice, Field(discriminator="step")]


InSession = Heartbeat | SelfReport | Accept | Decline | Manifest | Need | Leave | SumUp
"""Messages of a device inside a session."""
DeviceMessage = Hello | DeviceStatus | InSession
"""All messages of a device."""
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
    """The JSON bytes of a message, which are signed.

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
