"""The spec of a federation: what all members must agree on. Torch-free, so that the agent process can read it.

A spec is an artifact: its id is the sha256 of its canonical JSON bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
)

from fedcg.config_file import Settings
from fedcg.input_form import ImageForm as ImageForm
from fedcg.input_form import InputForm as InputForm
from fedcg.input_form import TensorForm as TensorForm
from fedcg.learning.errors import LearningError
from fedcg.wire import parts

# Fields that weigh a client in the merge; accuracy, loss and health are only for people.
_WEIGHING = frozenset({parts.ReportField.EXAMPLES, parts.ReportField.LABEL_COUNTS})
DEFAULT_MIN_COHORT = 3


def _in_one_sentence(value: object, validate: Callable[[object], object]) -> object:
    """What no kind of `ParameterValue` takes is refused once, and not once for each kind."""
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError("must be true, false, a text of at most 200 characters or a number within 1e18") from error


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
"""More devices than one coordinator serves."""
CropPixels = Annotated[int, Field(ge=0, le=64)]
_FederationId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f\x7f-\x9f]", name):
        raise ValueError(f"{name!r} can't be a folder's name: use letters, digits, dashes and spaces")
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
    """The padding of random crops, where every window shows some of an image whose shorter side is `side` pixels.

    Raises:
        ValueError: one could show padding alone.
    """
    if pixels >= side:
        raise ValueError(f"crops of {pixels} pixels can miss the whole image; the shorter side has {side}, use fewer")
    return pixels


class _Frozen(Settings):
    model_config = ConfigDict(allow_inf_nan=False)  # it is JSON, which has neither


_Count = Annotated[int, Field(ge=-64, le=1 << 20)]
_NetworkName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@+-]{1,200}$")]
_Weights = Annotated[
    str | None,
    Field(pattern=r"^[0-9a-f]{64}$", description="sha256 of the file with a backbone's weights; none: a random start"),
]


Freeze = Annotated[
    str,
    Field(
        pattern=r"^(none|stem|all|all-but:[A-Za-z0-9_.]{1,80})$",
        description="of a backbone with weights: none, stem, all, or all-but:STAGE, which trains STAGE and what follows it",
    ),
]


class BackboneChoice(_Frozen):
    """A backbone that a device may train in the place of the split's own, in front of a projection to as many features."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@]{1,160}$", description="BACKBONE or BACKBONE@STAGE")]
    weights: _Weights = None
    freeze: Freeze = "none"


PROGRAM = "program"
"""The split whose extractor is the devices' own code: the spec has its features' shape, and the classifier as data."""
TRAINER = "trainer"
"""The split of any other task: network, training and measure are the devices' own code, and the spec has the tensors alone."""


class Layer(_Frozen):
    """A standard layer as data; `fedcg.learning.networks.layers` has the kinds, and checks and builds it."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="linear, conv2d, relu, ...")]
    args: Annotated[
        dict[
            Annotated[str, Field(max_length=32)],
            bool
            | _Count
            | Annotated[float, Field(ge=-1e6, le=1e6)]
            | Annotated[tuple[_Count, ...], Field(max_length=4)],
        ],
        Field(max_length=12, description="as torch.nn names them"),
    ] = Field({})


class Features(_Frozen):
    """What an extractor makes of one input."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...], Field(min_length=1, max_length=4)]
    range: Annotated[
        Literal["unit", "non_negative", "real"],
        Field(description="unit: within [0, 1], non_negative: from 0 on, real: any"),
    ] = "real"


class NetworkChoice(_Frozen):
    """Which split, generator and discriminator, by name.

    A process that has a program's code binds it to the spec (`bound`): it is no part of the spec, and not sent.
    """

    split: Annotated[_NetworkName, Field(description="extractor and classifier: `fedcg network list`")] = "lenet5_relu"
    generator: Annotated[_NetworkName, Field(description="`fedcg network list`")] = "mlp"
    discriminator: Annotated[_NetworkName, Field(description="`fedcg network list`")] = "mlp"
    noise_dim: Annotated[int, Field(ge=1, le=4096, description="numbers that a generator starts from")] = 100
    weights: _Weights = None
    freeze: Freeze = "none"
    backbones: Annotated[
        tuple[BackboneChoice, ...],
        Field(max_length=16, description="others that a device may choose, where the split is BACKBONE+project:D"),
    ] = ()

    @field_validator("backbones")
    @classmethod
    def _are_others(cls, backbones: tuple[BackboneChoice, ...], info: ValidationInfo) -> tuple[BackboneChoice, ...]:
        own, plus, _ = str(info.data.get("split")).partition("+")
        names = [own, *(one.name for one in backbones)]
        if backbones and not plus:
            raise ValueError(f"{own} has no projection; other backbones need a split BACKBONE+project:D")
        if len(set(names)) < len(names):
            raise ValueError(f"each backbone once, the split's own too: {', '.join(names)}")
        return backbones

    # These are no part of other specs' bytes, and so of their names.
    features: Annotated[
        Features | None,
        Field(description=f"of the split {PROGRAM}: what its extractor makes", exclude_if=lambda one: one is None),
    ] = None
    classifier: Annotated[
        Annotated[tuple[Layer, ...], Field(min_length=1, max_length=64)] | None,
        Field(
            description=f"of the split {PROGRAM}: layers; none: its code is the program's alone",
            exclude_if=lambda layers: layers is None,
        ),
    ] = None
    extractor: Annotated[
        Annotated[tuple[parts.TensorLayout, ...], Field(min_length=1, max_length=4096)] | None,
        Field(
            description=f"of the splits {PROGRAM} and {TRAINER}: the tensors of the private part",
            exclude_if=lambda layouts: layouts is None,
        ),
    ] = None
    head: Annotated[
        Annotated[tuple[parts.TensorLayout, ...], Field(min_length=1, max_length=4096)] | None,
        Field(
            description=f"the tensors of the other part, where it is the program's code too: of {TRAINER}, or of {PROGRAM} without `classifier`",
            exclude_if=lambda layouts: layouts is None,
        ),
    ] = None
    _program: object = PrivateAttr(None)
    _task: object = PrivateAttr(None)

    @field_validator("extractor", "head", mode="before")
    @classmethod
    def _as_in_json(cls, layouts: Any) -> Any:
        """TOML's lists, where the layouts of a spec, which is JSON, are strict."""
        if not isinstance(layouts, list) or not all(isinstance(one, dict) for one in layouts):
            return layouts
        return [{key: tuple(of) if isinstance(of, list) else of for key, of in one.items()} for one in layouts]

    @property
    def program(self) -> object:
        """The split of the program (`networks.splits.Split`) that this process bound; None where it has none."""
        return self._program

    @property
    def task(self) -> object:
        """The task of the program (`networks.task.Task`), where its split is `trainer`."""
        return self._task

    def bound(self, program: object, task: object = None) -> NetworkChoice:
        """The same choice with the code of its program, a `networks.splits.Split`, and with its task."""
        own = self.model_copy()
        own._program, own._task = program, task  # noqa: SLF001 - a copy of its own
        return own

    @property
    def starts_on_devices(self) -> frozenset[parts.Part]:
        """Parts whose first weights only the program has: the first aggregate holds zeros in their place, which no device takes."""
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
        """Where the private networks' first weights come from, for people: what is public of them, an attacker has too.

        Args:
            has_secret: whether the device has its cohort's secret; None: not known here.
        """
        if self.split == PROGRAM:
            return "the weights that the program gives to all"
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
        raise ValueError(f"{name!r} is there {count} times; each class once")
    return names


def _with_classes(network: NetworkChoice, info: ValidationInfo) -> NetworkChoice:
    classes = info.data.get("classes")  # missing where it is wrong itself
    if classes is not None and (len(classes) < 2) != (network.split == TRAINER):
        needed = "has no classes: set classes = []" if network.split == TRAINER else "needs classes, two or more"
        raise ValueError(f"split = {network.split} {needed}")
    return network


def _for_images(pixels: int, info: ValidationInfo) -> int:
    """What changes images, on or off or a number of pixels; tensors have nothing of the kind."""
    form = info.data.get("input")  # missing where it is wrong itself
    if pixels and isinstance(form, TensorForm):
        raise ValueError("changes images, and the inputs are tensors: leave it out")
    return check_crop(pixels, min(form.height, form.width)) if pixels and form else pixels


def image_form(form: ImageForm | TensorForm, who: str = "this") -> ImageForm:
    """A form of images, for `who` works on images alone.

    Raises:
        LearningError: it is one of tensors.
    """
    if isinstance(form, TensorForm):
        raise LearningError(f"{who} needs images, not tensors of shape {list(form.shape)}")
    return form


class FederationSpec(_Frozen):
    """Everything that all members of a federation must agree on.

    Attributes:
        augment_flip: half of the training images are mirrored at random.
        augment_crop: training images are random windows of the image, padded with so many black pixels at every side; 0: they are not.
        report: every field that a device may report.
        optional_report: those of them that the method uses when they are reported and does not require.
        codec: of updates; `aggregate_codec` of aggregates.
        with_base: parts of an update that a delta codec takes to the aggregate which the round started from; the others go by value.
        sealed: parts that leave a device only within `Part.SEALED`: the cohort alone can read their weighted mean, nobody one device's.
        sealed_range: bound of their numbers whose layout has none, either way; None where nothing is sealed.
        alternates: every second round exchanges the statistics alone, and the others everything else.
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
        """`input`, for what works on images alone.

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
        """Whether devices tell how many images they have: what is averaged in the clear is weighted by it."""
        return bool(frozenset(self.upload) - {parts.Part.SEALED})

    @property
    def is_exact(self) -> bool:
        """Whether all that is learnt follows from sums over images, so that a device's can be taken out: sealed statistics alone leave devices."""
        return self.sealed == (parts.Part.STATISTICS,) and not self.has_public_counts

    def trains_in(self, number: int) -> bool:
        """Whether clients train in a round: not where it exchanges statistics of what the round before brought."""
        return not self.alternates or number % 2 == 1

    def shared_in(self, number: int) -> frozenset[parts.Part]:
        """The parts that a client of a round gives to the others, in the clear or sealed."""
        every = (frozenset(self.upload) - {parts.Part.SEALED}) | frozenset(self.sealed)
        if not self.alternates:
            return every
        return every - {parts.Part.STATISTICS} if self.trains_in(number) else every & {parts.Part.STATISTICS}

    def sealed_in(self, number: int) -> tuple[parts.Part, ...]:
        """Those of them that are sealed, sorted."""
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
        """What a part of an update is, for people."""
        if part is not parts.Part.SEALED:
            return part.meaning
        return f"{' and '.join(one.value for one in self.sealed)} as {part.meaning}"

    @staticmethod
    def parse(payload: bytes) -> FederationSpec:
        """Read a spec from its canonical bytes.

        Raises:
            ValueError: not a spec (pydantic's error names every bad field), or bytes that are not in canonical form.
        """
        spec = FederationSpec.model_validate_json(payload)
        if spec.canonical() != payload:
            raise ValueError("the spec's bytes are not in canonical form")
        return spec


class RoundPolicy(_Frozen):
    """How an operator wants the rounds of a federation to go; can be changed while it runs."""

    rounds: Annotated[_Rounds, Field(description="rounds until the federation is over")]
    min_clients: Annotated[_Clients, Field(description="a round opens and closes with at least so many")] = 3
    min_cohort: Annotated[
        _Clients, Field(description="no aggregate of fewer clients is ever published", validate_default=True)
    ] = DEFAULT_MIN_COHORT
    fraction: Annotated[float, Field(gt=0, le=1, description="share of the devices there whose updates are wanted")] = (
        1.0
    )
    max_clients: Annotated[_Clients | None, Field(description="at most so many updates are wanted")] = None
    over_selection: Annotated[
        float, Field(ge=0, le=4, description="invite so many more, as a share; a round closes with the wanted updates")
    ] = 0.0
    deadline_s: Annotated[
        float,
        Field(ge=1, le=MAX_DEADLINE_S, description="seconds that a round collects, from when the quorum has accepted"),
    ] = 3600.0
    max_attempts: Annotated[
        int, Field(ge=1, le=10_000, description="tries of one round before the federation stalls")
    ] = 3
    late: Annotated[
        Literal["drop", "next"],
        Field(description="an update that comes when its round has closed: dropped, or a teacher of the next round"),
    ] = "drop"
    late_decay: Annotated[
        float, Field(gt=0, le=1, description="share of its examples that a late update counts for in the next round")
    ] = 0.5
    pace: Annotated[
        Literal["equal-steps", "equal-time"],
        Field(
            description="every device takes the spec's local steps, or a slower one so many fewer that it ends with the median device"
        ),
    ] = "equal-steps"
    require_cohort: Annotated[
        bool,
        Field(
            description="devices without the cohort secret of most others are not invited; with masked sums always so"
        ),
    ] = False
    stop_patience: Annotated[
        _Rounds | None,
        Field(description="end after so many rounds in which most clients' validation accuracies rose no more"),
    ] = None
    stop_gain: Annotated[float, Field(ge=0, le=100, description="points of accuracy that count as better")] = 0.1

    @property
    def quorum(self) -> int:
        """An attempt opens with at least so many clients, and is merged from at least so many updates."""
        return max(self.min_clients, self.min_cohort)

    @field_validator("min_cohort", "max_clients")
    @classmethod
    def _fits_min_clients(cls, clients: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_clients")  # missing where it is wrong itself
        if least is None or clients is None:
            return clients
        if info.field_name == "min_cohort" and least < clients:
            raise ValueError(
                f"min_clients = {least} is below min_cohort = {clients}: an aggregate of so few clients shows each of them; "
                f"set min_cohort = {least} to allow it, or raise min_clients"
            )
        if info.field_name == "max_clients" and clients < least:
            raise ValueError(f"max_clients = {clients} is below min_clients = {least}")
        return clients


class FederationPlan(RoundPolicy):
    """What an operator writes to open a federation (TOML); the coordinator completes it to a `FederationSpec`.

    Attributes:
        codec: how updates are coded, `aggregate_codec` how aggregates are (`fedcg.wire.artifacts.payload`).
    """

    federation: Annotated[_FederationId, Field(description="id: small letters, digits and dashes")]
    classes: Annotated[_Classes, Field(description="class names in their order; folders of images have these names")]
    input: InputForm
    network: Annotated[NetworkChoice, Field(validate_default=True)] = NetworkChoice()
    method: Annotated[_MethodName, Field(description="`fedcg method list`")]
    params: dict[str, ParameterValue] = Field({}, description="of the method: `fedcg method show NAME`")
    seed: Annotated[_Seed, Field(description="initial weights of the shared parts follow from it")] = 0
    augment_flip: Annotated[bool, Field(description="mirror half of the training images at random")] = False
    augment_crop: Annotated[CropPixels, Field(description="random windows of images padded by so many pixels")] = 0
    codec: Annotated[parts.UpdateCodec, Field(description="how updates are coded")] = parts.DEFAULT_UPDATE_CODEC
    aggregate_codec: Annotated[parts.AggregateCodec, Field(description="how aggregates are coded")] = (
        parts.DEFAULT_AGGREGATE_CODEC
    )
    sealed: Annotated[
        tuple[parts.Part, ...],
        Field(
            description="parts that the method shares in the clear and only averages: seal them, for the cohort alone"
        ),
    ] = ()
    sealed_range: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="largest number of a sealed network, either way (batch norm's variances: 8,192); a round with a larger one fails",
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
    """Check an operator's plan; all errors at once.

    Raises:
        ValueError: names every bad field.
    """
    return FederationPlan.model_validate(values)


NetworkSpec = FederationSpec | FederationPlan
"""What networks are built from: both have network, input and classes."""
