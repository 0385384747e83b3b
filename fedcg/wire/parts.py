"""The closed list of names on the wire: parts of a model, fields of a report, layouts of tensors.

Everything that may cross the wire is listed here. This module must not know how parts are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from typing_extensions import Self


class _Explained(str, Enum):
    """Names with a meaning, shown to the owner of a device."""

    _value_: str
    meaning: str

    def __new__(cls, name: str, meaning: str = "") -> Self:
        """A member is its name."""
        member = str.__new__(cls, name)
        member._value_, member.meaning = name, meaning
        return member


class Part(_Explained):
    """A named part of a client's networks and statistics."""

    EXTRACTOR = "extractor", "the network that sees the images; it makes updates far more revealing"
    CLASSIFIER = "classifier", "the network from features to classes; it never sees an image"
    GENERATOR = ("generator", "makes features like those of the images, for a requested class; it never sees an image")
    DISCRIMINATOR = "discriminator", "separates the generator's features from those of the images"
    STATISTICS = "statistics", "numbers computed from the images, such as the mean features of each class"
    """The method defines their layout."""
    IMAGE_GENERATOR = ("image_generator", "a network that turns images into scrambled ones, trained on the images")
    SEALED = (
        "sealed",
        "parts behind masks: the coordinator can't read them, and devices of the cohort read only their mean over 4 devices or more",
    )
    """Other parts as integers. Only the cohort can read them, and only their sum over its devices."""


class ReportField(_Explained):
    """A field that a device may report in addition to the tensors of an update."""

    EXAMPLES = "examples", "the number of training images"
    ACCURACY = "accuracy", "accuracy of the personal model on this device's test images"
    LOSS = "loss", "mean loss of the local round"
    HEALTH = "health", "condition of the device: ok, hot, low power, low disk; its doctor's findings; its clock"
    LABEL_COUNTS = "label_counts", "the number of training images of each class"
    SHADOW = "shadow", "accuracy of the local-only model, trained on this device alone"
    DOWNLOADED = "downloaded", "accuracy of the downloaded model"
    PER_CLASS = "per_class", "these accuracies by class"
    AUDIT = "audit", "figures of this device's own audit of the update"
    EPSILON = "epsilon", "privacy budget that differentially private training has spent"
    COST = "cost", "seconds and energy of the local round"
    # In a device's self-report, not in an update.
    MODEL = "model", "the exported model in use: size, latency, accuracy, comparison, roll-back"
    TELEMETRY = "telemetry", "temperature, power, battery, what slows it down, free memory and disk, every five minutes"


class Health(str, Enum):
    """The condition that a device reports; a closed set, so that free text can never leave a device."""

    OK = "ok"
    HOT = "hot"
    LOW_POWER = "low_power"
    LOW_DISK = "low_disk"
    DEGRADED = "degraded"


DEFAULT_ALLOW_UPLOAD: frozenset[Part] = frozenset({Part.GENERATOR, Part.CLASSIFIER})
DEFAULT_ALLOW_REPORT: frozenset[ReportField] = frozenset(
    {ReportField.EXAMPLES, ReportField.ACCURACY, ReportField.LOSS, ReportField.HEALTH}
)
VOLUNTARY_REPORT: frozenset[ReportField] = frozenset(
    {
        ReportField.SHADOW,
        ReportField.DOWNLOADED,
        ReportField.PER_CLASS,
        ReportField.AUDIT,
        ReportField.EPSILON,
        ReportField.COST,
    }
)
"""Fields of an update that no spec requests: a device reports them if its owner allows it."""

MAX_NUMBER = 3.4e38
"""The largest number, near that of float32. JSON allows larger numbers and infinity; both are refused."""
TensorDtype = Literal["float32", "int64", "uint32"]

# Codecs by name; `fedcg.wire.artifacts.payload` describes each one.
AggregateCodec = Literal["f32", "f16"]
UpdateCodec = Literal["f32", "f16", "i8", "f16-delta", "i8-delta"]
TensorCodec = Literal["f32", "f16", "i8", "f16-delta", "i8-delta", "i64", "u32"]
DEFAULT_UPDATE_CODEC: UpdateCodec = "i8-delta"
DEFAULT_AGGREGATE_CODEC: AggregateCodec = "f16"


def is_delta(codec: TensorCodec) -> bool:
    """Whether a codec holds the difference to a base instead of the values."""
    return codec.endswith("-delta")


def is_absent(value: object) -> bool:
    """For `exclude_if`: an optional field without a value is left out of the JSON."""
    return value is None


_Bound = Annotated[Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)] | None, Field(exclude_if=is_absent)]


class TensorLayout(BaseModel, frozen=True, extra="forbid", strict=True):
    """Name, element type and shape of one tensor of a part.

    Attributes:
        low, high: bounds of every decoded number; None: no bound.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.]+$")]
    dtype: TensorDtype
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...], Field(max_length=8)]
    low: _Bound = None
    high: _Bound = None


PartLayouts = Mapping[Part, tuple[TensorLayout, ...]]

MIN_SUM_DEVICES, MAX_SUM_DEVICES = 4, 32
"""Bounds of one sealed sum. A smaller sum reveals too much about each device. More devices form several groups, whose sums are added."""
TAGS = 32
"""Numbers of a sealed sum that show whether it was altered."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
PerClass = Annotated[tuple[Share | None, ...], Field(max_length=10_000)]


class ClassAccuracies(BaseModel, frozen=True, extra="forbid"):
    """Accuracy by class of the models in a report: one number per class, None for a class without test images."""

    accuracy: PerClass | None = None
    shadow: PerClass | None = None
    downloaded: PerClass | None = None

    def fits(self, classes: int) -> bool:
        """Whether every list has a number for each class."""
        return all(one is None or len(one) == classes for one in (self.accuracy, self.shadow, self.downloaded))


AuditFigure = Literal["label_l1", "label_accuracy", "psnr", "ssim", "reid", "mia_auc", "mia_tpr", "class_recognised",
                      "class_ssim", "memory_auc", "memory_worst", "inverter_psnr", "inverter_ssim", "epsilon"]  # fmt: skip
"""The figures of an audit, as gates and reports name them."""
MAX_GAIN = 1e6
Gain = Annotated[float, Field(ge=-MAX_GAIN, le=MAX_GAIN, allow_inf_nan=False)]


class PrivacySpent(BaseModel, frozen=True, extra="forbid"):
    """What a device's differentially private training has spent in this federation.

    Attributes:
        epsilon: at `delta`, over all rounds so far.
        budget: of epsilon, at which the device stops training; None: no budget.
    """

    epsilon: Annotated[float, Field(ge=0.0, le=MAX_NUMBER)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    budget: Annotated[float, Field(gt=0.0, le=MAX_NUMBER)] | None = None


class RoundCost(BaseModel, frozen=True, extra="forbid"):
    """The cost of a local round on the device until its update was created.

    Attributes:
        seconds: pauses included.
        joules: None if the device has no sensor.
    """

    seconds: Annotated[float, Field(ge=0.0, le=1e9)]
    joules: Annotated[float, Field(ge=0.0, le=1e12)] | None = None


class Report(BaseModel, frozen=True, extra="forbid"):
    """The report of a device about a local round; every field is optional, absent means not reported.

    Attributes:
        accuracy: of the personal model on the device's own test images; `shadow` that of the local-only model on the same images,
            `downloaded` that of the personal model at the start of the round, with the downloaded parts.
        per_class: the same by class.
        audit: by figure, the gain over the best guess in the device's own audit of this update: the upper end of its interval.
        epsilon: of the device's differentially private training.
        cost: of the round.
    """

    examples: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    loss: Annotated[float, Field(ge=0.0, le=MAX_NUMBER)] | None = None
    health: Health | None = None
    label_counts: Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...], Field(max_length=100_000)] | None = (
        None
    )
    # Added later: omitted if absent, so that older artifacts keep their bytes.
    shadow: Annotated[Share | None, Field(exclude_if=is_absent)] = None
    downloaded: Annotated[Share | None, Field(exclude_if=is_absent)] = None
    per_class: Annotated[ClassAccuracies | None, Field(exclude_if=is_absent)] = None
    audit: Annotated[dict[AuditFigure, Gain] | None, Field(max_length=16, exclude_if=is_absent)] = None
    epsilon: Annotated[PrivacySpent | None, Field(exclude_if=is_absent)] = None
    cost: Annotated[RoundCost | None, Field(exclude_if=is_absent)] = None

    def fields(self) -> frozenset[ReportField]:
        """The fields that this report actually carries."""
        return frozenset(ReportField(name) for name in type(self).model_fields if getattr(self, name) is not None)

    def only(self, allowed: frozenset[ReportField]) -> Report:
        """The same report with only the fields in `allowed`."""
        return Report(**{field.value: getattr(self, field.value) for field in allowed})
