"""The condition of a device as it reports it: why it declines, what its own doctor found, the exported model in use. Codes, no free text."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DoctorCheck = Literal["clock", "disk", "keys", "certificate", "data", "cohort secret", "training"]
"""The checks of `fedcg doctor` that concern the device itself; a closed set, so that a path or a file name can never leave it."""
FormName = Literal["fp32", "ort", "fp16", "int8", "trt_fp16"]
Number = Annotated[int, Field(ge=0, le=1 << 53)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Celsius = Annotated[float, Field(ge=-273.15, le=1000.0)]


class DeclineReason(str, Enum):
    """Why a device does not take part in a round; a closed set, so that free text can never leave a device."""

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
    PAUSED = "paused"
    NEEDS_APPROVAL = "needs_approval"
    DAILY_LIMIT = "daily_limit"
    # Of the box itself, where its owner allows `health` (else NOT_ELIGIBLE); `devices.eligibility.Obstacle` has the same values.
    RESERVED = "reserved"
    SERVING = "serving"
    HOT = "hot"
    THROTTLED = "throttled"
    ON_BATTERY = "on_battery"
    POWER_MODE = "power_mode"
    QUIET_HOURS = "quiet_hours"
    LOW_DISK = "low_disk"
    LOW_MEMORY = "low_memory"
    METERED = "metered"
    NO_TIME = "no_time"

    @property
    def passes(self) -> bool:
        """Whether it may pass while the attempt is open: a round that needs the device waits for it."""
        return self.value in _PASSING

    @property
    def needs_owner(self) -> bool:
        """Whether it ends as soon as the device's owner approves the spec."""
        return self in (self.UPLOAD_NOT_ALLOWED, self.REPORT_NOT_ALLOWED, self.NEEDS_APPROVAL)


_PASSING = frozenset(
    {"interrupted", "reserved", "serving", "hot", "throttled", "on_battery", "power_mode", "quiet_hours"}
    | {"low_disk", "low_memory", "metered"}
)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DoctorFinding(_Value):
    """A check that did not end well: "warning" (it works, but look at it) or "failed"."""

    check: DoctorCheck
    state: Literal["warning", "failed"]


class FormEvidence(_Value):
    """One form of an exported model as the device's export measured it, on held-out images.

    Attributes:
        size: bytes of its file; None where it was tried and not kept.
        latency_ms: median milliseconds of one prediction at batch 1.
        accuracy: share of the images that it gets right.
        agreement: share for which it names the class that the model as exported names.
        images: how many.
    """

    name: FormName
    size: Number | None = None
    latency_ms: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    accuracy: Share | None = None
    agreement: Share | None = None
    images: Number = 0


class ServedModel(_Value):
    """The exported model in use.

    Attributes:
        version: its number on the device.
        round: that its weights come from.
        serves: the form in use.
        accuracy: share of the device's test images that the model as exported gets right.
        before: the same of the version in use before it.
        forms: all forms that were tried.
    """

    version: Annotated[str, Field(pattern=r"^\d{1,9}$")]
    round: Number
    serves: FormName
    accuracy: Share | None = None
    before: Share | None = None
    forms: Annotated[tuple[FormEvidence, ...], Field(max_length=8)] = ()


class Readings(_Value):
    """What a device's sensors read; None where it has no such sensor, which is never zero.

    Attributes:
        temperature_c: of the zone that is nearest to its limit, and `limit_c` that limit, in °C.
        watts: that the box draws, or its GPU alone where only that is measured.
        battery: charge of the emptiest battery or UPS, a share.
        on_mains: whether a mains or USB supply delivers.
        slowed_by: what lowers its clocks now; empty: nothing.
        free_memory, free_disk: bytes, within the limits of its control group, and where the private store lies.
    """

    temperature_c: Celsius | None = None
    limit_c: Celsius | None = None
    watts: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    battery: Share | None = None
    on_mains: bool | None = None
    slowed_by: Annotated[tuple[Literal["software", "hardware"], ...], Field(max_length=2)] = ()
    free_memory: Number | None = None
    free_disk: Number | None = None


class DeviceCondition(_Value):
    """What a device reports of itself; None where its owner does not allow it, or it is not known yet.

    Attributes:
        findings: of its own doctor, where the owner allows `health`.
        model: where the owner allows `model`, and one was exported.
        paused: True while the owner has paused the device, where the owner allows `health`.
    """

    findings: Annotated[tuple[DoctorFinding, ...], Field(max_length=16)] | None = None
    model: ServedModel | None = None
    paused: Annotated[Literal[True] | None, Field(exclude_if=lambda paused: paused is None)] = None
