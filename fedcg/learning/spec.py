"""The spec of a federation: what all members must agree on. Torch-free, so the agent process can read it.

A spec is an artifact: its id is the sha256 of its canonical JSON bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, ValidationInfo, WrapValidator, field_validator

from fedcg.config_file import Settings
from fedcg.input_form import ImageForm as ImageForm
from fedcg.input_form import InputForm as InputForm
from fedcg.input_form import TensorForm as TensorForm
from fedcg.learning.errors import LearningError
from fedcg.wire import parts

# Fields that set a client's weight in the merge. Accuracy, loss and health are informational.
_WEIGHING = frozenset({parts.ReportField.EXAMPLES, parts.ReportField.LABEL_COUNTS})
DEFAULT_MIN_COHORT = 3


def _in_one_sentence(value: object, validate: Callable[[object], object]) -> object:
    """Report one error for a value that no type of `ParameterValue` accepts, not one per type."""
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError("must be true, false, a text of at most 200 characters or a number within ±1e18") from error


ParameterValue = Annotated[
    bool
    | Annotated[int, Field(ge=-(1 << 31), le=1 << 31)]
    | Annotated[float, Field(ge=-1e18, le=1e18)]
    | Annotated[str, Field(max_length=200)]
    | None,
    WrapValidator(_in_one_sentence),
]
MAX_DEADLINE_S = 366 * 86_400.0
_Clients = Annotated[int, Field(ge=1, le=100_000)]
"""An upper bound beyond what one coordinator can serve."""
CropPixels = Annotated[int, Field(ge=0, le=64)]
_FederationId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f\x7f-\x9f]", name):
        raise ValueError(f"{name!r} can't be a folder name: use letters, digits, dashes and spaces")
    return name


_ClassName = Annotated[str, Field(max_length=255), AfterValidator(_folder_name)]


def _none_or_several(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) == 1:
        raise ValueError("must have at least 2 items, or none for a task without classes")
    return names


_Classes = Annotated[tuple[_ClassName, ...], Field(max_length=10_000), AfterValidator(_none_or_several)]
METHOD_PATTERN = r"^[a-z][a-z0-9_]{0,62}$"
_MethodName = Annotated[str, Field(pattern=METHOD_PATTERN)]
_Rounds = Annotated[int, Field(ge=1, le=100_000)]
_Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


def check_crop(pixels: int, side: int) -> int:
    """Check that with this padding every random crop overlaps an image whose shorter side is `side` pixels.

    Raises:
        ValueError: a crop could contain padding only.
    """
    if pixels >= side:
        raise ValueError(f"crops of {pixels} pixels can miss the whole image; use fewer than its shorter side, {side}")
    return pixels


class _Frozen(Settings, allow_inf_nan=False):
    """Base of what is in a spec: JSON, which has neither infinity nor NaN."""


_Count = Annotated[int, Field(ge=-64, le=1 << 20)]
_NetworkName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@+-]{1,200}$")]
_Weights = Annotated[
    str | None,
    Field(pattern=r"^[0-9a-f]{64}$", description="sha256 of the backbone's weights file; none: random initialisation"),
]


Freeze = Annotated[
    str,
    Field(
        pattern=r"^(none|stem|all|all-but:[A-Za-z0-9_.]{1,80})$",
        description="frozen layers of a pretrained backbone: none, stem, all, or all-but:STAGE, which trains STAGE and all later layers",
    ),
]


class BackboneChoice(_Frozen):
    """A backbone that a device may train instead of the split's own, with a projection to the same number of features."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@]{1,160}$", description="BACKBONE or BACKBONE@STAGE")]
    weights: _Weights = None
    freeze: Freeze = "none"


PROGRAM = "program"
"""The split whose extractor is defined by the devices' code. The spec holds the feature shape, and the classifier as data."""
TRAINER = "trainer"
"""The split of any other task. The devices' code defines network, training and metric; the spec holds only the tensor layouts."""


class Layer(_Frozen):
    """A standard layer as data. `fedcg.learning.networks.layers` defines the kinds, checks layers and builds them."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="linear, conv2d, relu, ...")]
    args: Annotated[
        dict[
            Annotated[str, Field(max_length=32)],
            bool
            | _Count
            | Annotated[float, Field(ge=-1e6, le=1e6)]
            | Annotated[tuple[_Count, ...], Field(max_length=4)],
        ],
        Field(max_length=12, description="arguments, named as in torch.nn"),
    ] = Field({})


class Features(_Frozen):
    """An extractor's output for one input.

    Attributes:
        shape: of the extractor's output for one input, without the batch, such as `[64]`.
        range: of its numbers: unit (0 to 1), non_negative (0 or more) or real (any).
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...], Field(min_length=1, max_length=4)]
    range: Annotated[
        Literal["unit", "non_negative", "real"], Field(description="unit: in [0, 1], non_negative: >= 0, real: any")
    ] = "real"


_Layouts = Annotated[tuple[parts.TensorLayout, ...], Field(min_length=1, max_length=4096)]


class NetworkChoice(_Frozen):
    """Which split, generator and discriminator, by name.

    A process that has a program's code binds it to the spec (`bound`). The code is not part of the spec and is never
    sent.
    """

    split: Annotated[_NetworkName, Field(description="extractor and classifier: `fedcg network list`")] = "lenet5_relu"
    generator: Annotated[_NetworkName, Field(description="`fedcg network list`")] = "mlp"
    discriminator: Annotated[_NetworkName, Field(description="`fedcg network list`")] = "mlp"
    noise_dim: Annotated[int, Field(ge=1, le=4096, description="dimension of the generator's noise")] = 100
    weights: _Weights = None
    freeze: Freeze = "none"
    backbones: Annotated[
        tuple[BackboneChoice, ...],
        Field(max_length=16, description="further backbones that a device may choose, for a split BACKBONE+project:D"),
    ] = ()

    @field_validator("backbones")
    @classmethod
    def _are_others(cls, backbones: tuple[BackboneChoice, ...], info: ValidationInfo) -> tuple[BackboneChoice, ...]:
        own, plus, _ = str(info.data.get("split")).partition("+")
        names = [own, *(one.name for one in backbones)]
        if backbones and not plus:
            raise ValueError(f"{own} has no projection; further backbones need a split BACKBONE+project:D")
        if len(set(names)) < len(names):
            raise ValueError(f"list each backbone once, without the split's own: {', '.join(names)}")
        return backbones

    # Other specs leave these out of their bytes, so their digests do not depend on them.
    features: Annotated[
        Features | None, Field(description=f"split {PROGRAM}: output of the extractor", exclude_if=parts.is_absent)
    ] = None
    classifier: Annotated[
        Annotated[tuple[Layer, ...], Field(min_length=1, max_length=64)] | None,
        Field(
            description=f"split {PROGRAM}: layers of the classifier; none: defined only by the program",
            exclude_if=parts.is_absent,
        ),
    ] = None
    extractor: Annotated[
        _Layouts | None,
        Field(description=f"splits {PROGRAM} and {TRAINER}: tensors of the private part", exclude_if=parts.is_absent),
    ] = None
    head: Annotated[
        _Layouts | None,
        Field(
            description=f"split {TRAINER}, or {PROGRAM} without `classifier`: tensors of the other part, also defined by the program",
            exclude_if=parts.is_absent,
        ),
    ] = None
    _program: object = PrivateAttr(None)
    _task: object = PrivateAttr(None)

    @field_validator("extractor", "head", mode="before")
    @classmethod
    def _as_in_json(cls, layouts: Any) -> Any:
        """Accept TOML's lists; the strict layouts of a spec expect JSON."""
        if not isinstance(layouts, list) or not all(isinstance(one, dict) for one in layouts):
            return layouts
        return [{key: tuple(of) if isinstance(of, list) else of for key, of in one.items()} for one in layouts]

    @property
    def program(self) -> object:
        """The program's split (`networks.splits.Split`) bound by this process; None if there is none."""
        return self._program

    @property
    def task(self) -> object:
        """The program's task (`networks.task.Task`), if the split is `trainer`."""
        return self._task

    def bound(self, program: object, task: object = None) -> NetworkChoice:
        """The same choice with the code of its program, a `networks.splits.Split`, and with its task."""
        own = self.model_copy()
        own._program, own._task = program, task  # noqa: SLF001 - its own copy
        return own

    @property
    def starts_on_devices(self) -> frozenset[parts.Part]:
        """Parts whose initial weights only the program has. The first aggregate holds zeros for them, which devices ignore."""
        own = {parts.Part.EXTRACTOR: self.split in (PROGRAM, TRAINER), parts.Part.CLASSIFIER: self.head is not None}
        return frozenset(part for part, is_own in own.items() if is_own)

    @property
    def backbone_names(self) -> tuple[str, ...]:
        """Names of the backbones that a device may train, the split's own first."""
        return (self.split.partition("+")[0], *(one.name for one in self.backbones))

    def with_backbone(self, name: str) -> NetworkChoice:
        """The networks of a device that trains the backbone `name`, one of `backbone_names`."""
        own, _, projection = self.split.partition("+")
        chosen = {one.name: one for one in self.backbones}.get(name)
        if chosen is None:
            assert name == own, name
            return self.model_copy(update={"backbones": ()})
        changed = {"split": f"{name}+{projection}", "weights": chosen.weights, "freeze": chosen.freeze}
        return self.model_copy(update={**changed, "backbones": ()})

    def private_start(self, has_secret: bool | None) -> str:
        """Where the private networks' initial weights come from, as a text. An attacker knows the public ones too.

        Args:
            has_secret: whether the device has its cohort's secret; None: unknown.
        """
        if self.split == PROGRAM:
            return "the weights that the program gives to all sites"
        if self.backbones:
            return "; ".join(
                f"{name}: {self.with_backbone(name).private_start(has_secret)}" for name in self.backbone_names
            )
        drawn = "cohort secret, or the public spec seed on a device without one"
        if has_secret is not None:
            drawn = "cohort secret" if has_secret else "public spec seed"
        if self.weights is None:
            return drawn
        before = f"frozen before {self.freeze.partition(':')[2]}"
        kept = {"none": "trained on", "stem": "stem frozen", "all": "frozen"}.get(self.freeze, before)
        return f"backbone public (sha256 {self.weights[:12]}, {kept}), projection from the {drawn}"


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{name!r} is listed {count} times; list each class once")
    return names


def _with_classes(network: NetworkChoice, info: ValidationInfo) -> NetworkChoice:
    classes = info.data.get("classes")  # missing where it is wrong itself
    if classes is not None and (len(classes) < 2) != (network.split == TRAINER):
        needed = "has no classes: set classes = []" if network.split == TRAINER else "needs classes, two or more"
        raise ValueError(f"split = {network.split} {needed}")
    return network


def _for_images(pixels: int, info: ValidationInfo) -> int:
    """Refuse an image augmentation (a switch or a number of pixels) for tensor inputs."""
    form = info.data.get("input")  # missing where it is wrong itself
    if pixels and isinstance(form, TensorForm):
        raise ValueError("applies to images only, and the inputs are tensors: leave it out")
    return check_crop(pixels, min(form.height, form.width)) if pixels and form else pixels


def image_form(form: ImageForm | TensorForm, who: str = "this") -> ImageForm:
    """The form of the input as images, for a caller `who` that needs images.

    Raises:
        LearningError: the inputs are tensors.
    """
    if isinstance(form, TensorForm):
        raise LearningError(f"{who} needs images, not tensors of shape {list(form.shape)}")
    return form


class FederationSpec(_Frozen):
    """Everything that all members of a federation must agree on.

    Attributes:
        augment_flip: half of the training images are mirrored at random.
        augment_crop: training images are random crops of the image, padded with this many black pixels on every side;
            0: no crops.
        report: every field that a device may report.
        optional_report: fields of `report` that the method uses but does not require.
        codec: number format of updates; `aggregate_codec`: of aggregates.
        with_base: parts of an update that a delta codec stores as the difference to the round's starting aggregate;
            others go by value.
        sealed: parts that leave a device only inside `Part.SEALED`: only the cohort can read their weighted mean, and
            single updates are unreadable.
        sealed_range: largest absolute value of sealed numbers whose layout has no bounds; None if nothing is sealed.
        alternates: every second round exchanges only the statistics, the others everything else.
    """

    format: Literal[1] = 1
    federation: _FederationId
    classes: _Classes
    input: InputForm
    network: NetworkChoice
    method: _MethodName
    params: dict[str, ParameterValue]
    rounds: _Rounds
    seed: _Seed
    augment_flip: bool = False
    augment_crop: CropPixels = 0
    upload: tuple[parts.Part, ...]
    report: tuple[parts.ReportField, ...]
    optional_report: tuple[parts.ReportField, ...] = ()
    layouts: dict[parts.Part, tuple[parts.TensorLayout, ...]]
    codec: parts.UpdateCodec = "f32"
    aggregate_codec: parts.AggregateCodec = "f32"
    with_base: tuple[parts.Part, ...] = ()
    sealed: tuple[parts.Part, ...] = ()
    sealed_range: Annotated[float | None, Field(gt=0, le=parts.MAX_NUMBER)] = None
    alternates: bool = False

    _fit_images = field_validator("augment_flip", "augment_crop")(_for_images)
    _has_classes = field_validator("network")(_with_classes)

    def canonical(self) -> bytes:
        """The bytes that name this spec: sorted-key JSON without spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The sha256 of `canonical()`, in hex."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def image(self) -> ImageForm:
        """`input`, for callers that need images.

        Raises:
            LearningError: the inputs are tensors.
        """
        return image_form(self.input)

    @property
    def class_count(self) -> int:
        """C, the number of classes."""
        return len(self.classes)

    @property
    def required_report(self) -> frozenset[parts.ReportField]:
        """The report fields without which an update can't be merged."""
        return (_WEIGHING & frozenset(self.report)) - frozenset(self.optional_report)

    @property
    def has_public_counts(self) -> bool:
        """Whether devices report their number of images, which weights the averages in the clear."""
        return bool(frozenset(self.upload) - {parts.Part.SEALED})

    @property
    def is_exact(self) -> bool:
        """Whether the result depends only on sums over images (sealed statistics alone leave devices), so a device's can be subtracted."""
        return self.sealed == (parts.Part.STATISTICS,) and not self.has_public_counts

    def trains_in(self, number: int) -> bool:
        """Whether clients train in a round. They do not in rounds that exchange statistics of the previous aggregate."""
        return not self.alternates or number % 2 == 1

    def shared_in(self, number: int) -> frozenset[parts.Part]:
        """The parts that a client shares in a round, in the clear or sealed."""
        every = (frozenset(self.upload) - {parts.Part.SEALED}) | frozenset(self.sealed)
        if not self.alternates:
            return every
        return every - {parts.Part.STATISTICS} if self.trains_in(number) else every & {parts.Part.STATISTICS}

    def sealed_in(self, number: int) -> tuple[parts.Part, ...]:
        """The sealed parts among `shared_in`, sorted."""
        return tuple(sorted(self.shared_in(number) & frozenset(self.sealed)))

    def update_layouts(self, number: int) -> parts.PartLayouts:
        """The tensors of an update of a round, as the wire carries them."""
        sealed = frozenset(part.value for part in self.sealed_in(number))
        clear = {part: self.layouts[part] for part in sorted(self.shared_in(number) - frozenset(self.sealed))}
        if not sealed:
            return clear
        numbers = tuple(layout for layout in self.layouts[parts.Part.SEALED] if layout.name in sealed)
        return {**clear, parts.Part.SEALED: numbers}

    def meaning_of(self, part: parts.Part) -> str:
        """A readable description of a part of an update."""
        if part is not parts.Part.SEALED:
            return part.meaning
        return f"{' and '.join(one.value for one in self.sealed)} as {part.meaning}"

    @staticmethod
    def parse(payload: bytes) -> FederationSpec:
        """Read a spec from its canonical bytes.

        Raises:
            ValueError: not a spec (pydantic's error names every bad field), or not in canonical form.
        """
        spec = FederationSpec.model_validate_json(payload)
        if spec.canonical() != payload:
            raise ValueError("the spec's bytes are not in canonical form")
        return spec


class RoundPolicy(_Frozen):
    """An operator's rules for the rounds of a federation, which can change while it runs."""

    rounds: Annotated[_Rounds, Field(description="total number of rounds")]
    min_clients: Annotated[
        _Clients, Field(description="minimum clients to open a round, and updates to close it at the deadline")
    ] = 3
    min_cohort: Annotated[
        _Clients, Field(description="aggregates of fewer clients are never published", validate_default=True)
    ] = DEFAULT_MIN_COHORT
    fraction: Annotated[
        float, Field(gt=0, le=1, description="fraction of available devices whose updates are wanted")
    ] = 1.0
    max_clients: Annotated[_Clients | None, Field(description="maximum number of updates wanted")] = None
    over_selection: Annotated[
        float,
        Field(ge=0, le=4, description="fraction of extra clients to invite; a round closes with the wanted updates"),
    ] = 0.0
    deadline_s: Annotated[
        float,
        Field(ge=1, le=MAX_DEADLINE_S, description="seconds to collect updates, counted from the quorum's acceptance"),
    ] = 3600.0
    max_attempts: Annotated[int, Field(ge=1, le=10_000, description="attempts at a round before it stalls")] = 3
    pace: Annotated[
        Literal["equal-steps", "equal-time"],
        Field(
            description="all devices take the spec's local steps, or slower ones take fewer, to finish with the median device"
        ),
    ] = "equal-steps"
    require_cohort: Annotated[
        bool,
        Field(
            description="do not invite devices whose cohort secret differs from the majority's; always on with sealed sums"
        ),
    ] = False
    stop_patience: Annotated[
        _Rounds | None,
        Field(description="end after this many rounds without a better validation accuracy on most clients"),
    ] = None
    stop_gain: Annotated[float, Field(ge=0, le=100, description="accuracy points that count as a gain")] = 0.1

    @property
    def quorum(self) -> int:
        """The minimum number of clients to open an attempt, and of updates to merge it."""
        return max(self.min_clients, self.min_cohort)

    @field_validator("min_cohort", "max_clients")
    @classmethod
    def _fits_min_clients(cls, clients: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_clients")  # missing where it is wrong itself
        if least is None or clients is None:
            return clients
        if info.field_name == "min_cohort" and least < clients:
            raise ValueError(
                f"min_clients = {least} is below min_cohort = {clients}: an aggregate of so few clients reveals each of them; "
                f"set min_cohort = {least} to allow it, or raise min_clients"
            )
        if info.field_name == "max_clients" and clients < least:
            raise ValueError(f"max_clients = {clients} is below min_clients = {least}")
        return clients


class FederationPlan(RoundPolicy):
    """What an operator writes to open a federation (TOML). The coordinator completes it to a `FederationSpec`.

    Attributes:
        codec: number format of updates, `aggregate_codec` of aggregates (`fedcg.wire.artifacts.payload`).
    """

    federation: Annotated[_FederationId, Field(description="id: lowercase letters, digits and dashes")]
    classes: Annotated[_Classes, Field(description="class names in label order; image folders have these names")]
    input: InputForm
    network: Annotated[NetworkChoice, Field(validate_default=True)] = NetworkChoice()
    method: Annotated[_MethodName, Field(description="`fedcg method list`")]
    params: dict[str, ParameterValue] = Field({}, description="method parameters: `fedcg method show NAME`")
    seed: Annotated[_Seed, Field(description="determines the initial weights of shared parts")] = 0
    augment_flip: Annotated[bool, Field(description="mirror half of the training images at random")] = False
    augment_crop: Annotated[CropPixels, Field(description="random crops of images padded by this many pixels")] = 0
    codec: Annotated[parts.UpdateCodec, Field(description="number format of updates")] = parts.DEFAULT_UPDATE_CODEC
    aggregate_codec: Annotated[parts.AggregateCodec, Field(description="number format of aggregates")] = (
        parts.DEFAULT_AGGREGATE_CODEC
    )
    sealed: Annotated[
        tuple[parts.Part, ...],
        Field(description="further parts to seal, readable only by the cohort; the method must only average them"),
    ] = ()
    sealed_range: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="largest absolute value in a sealed network (batch norm variances: 8,192); a round with a larger one fails",
        ),
    ] = 64.0

    _has_classes = field_validator("network")(_with_classes)
    _classes_differ = field_validator("classes")(_each_once)
    _fit_images = field_validator("augment_flip", "augment_crop")(_for_images)

    @property
    def image(self) -> ImageForm:
        """As `FederationSpec.image`."""
        return image_form(self.input)


def plan_from_mapping(values: dict[str, Any]) -> FederationPlan:
    """Check an operator's plan and report all errors at once.

    Raises:
        ValueError: names every bad field.
    """
    return FederationPlan.model_validate(values)


NetworkSpec = FederationSpec | FederationPlan
"""Networks are built from either: both have network, input and classes."""
