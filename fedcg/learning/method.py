"""The contract of a federated method: one value that holds both halves of an algorithm.

The caller (trainer, aggregation worker, simulation) never branches on a method's name. It calls these functions. Laws
(tested for every installed method with its `example`; see `docs/how-to/add-a-method.md`):
  * `local_round` with the same state, data, aggregate and streams returns the same result bit for bit on one CPU;
  * `LocalResult.shared` holds exactly the parts of `payload.up` that the round exchanges; `private` holds every part of
    the client; both own their storage;
  * `local_round` does not change the given state, aggregate or data;
  * `finish` does not depend on the order of `add`, nor on whether or how often `add` was called for a client;
  * a loss that is not finite raises `DivergedError`, and fewer than two training images raise `DataError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from fedcg.config_file import Settings
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, NetworkSpec
from fedcg.values import Value
from fedcg.wire.parts import Part, Report, TensorLayout

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedcg.learning.image_set import ImageSet
    from fedcg.learning.round_checkpoint import RoundCheckpoint

    Weights = Mapping[str, torch.Tensor]
else:
    Weights = Mapping[str, Any]

Parts = Mapping[Part, Weights]
"""Weights by part."""
Progress = Callable[[str, int, int], None]
Combination = Literal["mean", "median", "trimmed"]
"""How client values are combined: the mean weighted by examples, or a statistic that is robust to a minority."""


class DivergedError(Exception):
    """A local round or a distillation produced NaN or an exploding loss. The previous state is kept."""


def check_finite(parts: Parts, what: str) -> None:
    """Check weights for which no loss was computed, such as those after the last step.

    Raises:
        DivergedError: a number is not finite; names `what` and the tensor.
    """
    for part, weights in parts.items():
        for name, tensor in weights.items():
            if not bool(tensor.isfinite().all()):
                raise DivergedError(f"{what}: {part.value}/{name} is not finite; the previous state is kept")


class TrainingParams(Settings):
    """Parameters of every method; each method extends them. Unknown keys are errors."""

    epochs: int = Field(default=20, ge=1, description="local epochs per round")
    steps: int = Field(default=0, ge=0, description="local steps per round; 0: use epochs instead")
    batch_size: int = Field(default=16, ge=2, description="local batch size")
    optimiser: str = Field(default="adam", pattern="^(adam|sgd)$", description="optimiser of extractor and classifier")
    lr: float = Field(default=3e-4, gt=0, description="learning rate of extractor and classifier")
    weight_decay: float = Field(default=1e-4, ge=0, description="weight decay of extractor and classifier")
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        exclude_if=lambda ema: ema == 0.0,
        description="decay of a moving average of the client's weights over a round's steps; one more candidate for the deployed model",
    )

    @property
    def needs_label_counts(self) -> bool:
        """Whether these values require label counts that are `OPTIONAL` for the method."""
        return False

    @property
    def needs_cohort(self) -> bool:
        """Whether these values require the cohort's secret, which the method otherwise does without."""
        return False


# Parameters that several methods have, each with its default. A spec without one keeps the digest from before the
# parameter existed.
Average = Annotated[
    Combination,
    Field(
        exclude_if=lambda average: average == "mean",
        description="how client weights are combined: mean weighted by examples, or coordinate-wise median or trimmed mean, unweighted",
    ),
]
Aux = Annotated[
    float,
    Field(
        ge=0,
        exclude_if=lambda aux: aux == 0.0,
        description="weight of a second cross-entropy, through the frozen downloaded classifier; from round 2 on",
    ),
]
ServerMomentum = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        exclude_if=lambda momentum: momentum == 0.0,
        description="server momentum of the averaged classifier (FedAvgM, Hsu et al. 2019, for that part only)",
    ),
]
Taught = Annotated[
    Literal["sum", "standardised", "median", "trimmed"],
    Field(
        exclude_if=lambda ensemble: ensemble == "sum",
        description="how teacher outputs are combined: weighted sum of logits; the same with teachers on one scale (standardised); "
        "median or trimmed mean of log-probabilities, unweighted",
    ),
]


def silent(*_: object) -> None:
    """A callback that does nothing."""


class Machine(Value):
    """The hardware that a half of a method uses.

    Attributes:
        device: torch device string.
        graphs: whether training steps on a CUDA device may run as CUDA graphs.
        most_rows: maximum rows per forward pass of a teacher, or per forward and backward pass of a training step, if
            memory is short; None: no limit. It changes the last digits.
    """

    device: str = "cpu"
    graphs: bool = True
    most_rows: int | None = None


class Callbacks(Value):
    """Callbacks through which a half of a method reports.

    Attributes:
        progress: called with (phase, step, steps); phases are "classify", "generate", "calibrate", "teacher", "distil",
            "evaluate".
        watch_loss: called at intervals with the mean loss of the last steps of "distil", before the `progress` of its
            step.
        warn: called with a sentence for the owner of the device.
    """

    progress: Progress = silent
    watch_loss: Callable[[float], None] = silent
    warn: Callable[[str], None] = silent


class Cohort(Value):
    """What the clients share and the server does not know.

    Attributes:
        streams: randomness derived from the cohort's secret, scoped to the federation, equal on all clients. None on a
            server or without a secret.
        votes: each client's vote bits (`Method.vote`) before the round's sealed sum. All its clients see the same
            votes; empty without a sum.
        changed: whether an earlier sealed sum of the round's parts had other clients. If so, statistics that change
            little between rounds must use a fresh random half of the images. Otherwise the difference of two sums could
            reveal a client's, and it would not participate.
    """

    streams: Streams | None = None
    votes: Mapping[str, int] = field(default_factory=dict)
    changed: bool = False


class RoundContext(Value):
    """What a half of a method may use in addition to its state and data.

    Attributes:
        spec: the federation's spec; `round` counts from 1 to `spec.rounds`, or further if the federation was extended.
        streams: already scoped to (federation, round, attempt).
        public: unlabelled images, [N, C, H, W] uint8, for the server half; None without public images.
        validation: the client's validation images, for model selection and never for training; None on a server or if a
            client has none.
        privacy: this client's mechanisms; all off by default. A server half has none.
        checkpoint: stores the state within a local round; None: an interrupted round restarts from its beginning.
    """

    spec: FederationSpec
    round: int
    attempt: int
    streams: Streams
    machine: Machine = Machine()
    callbacks: Callbacks = Callbacks()
    cohort: Cohort = Cohort()
    public: torch.Tensor | None = None
    validation: ImageSet | None = None
    privacy: PrivacySettings = OFF
    checkpoint: RoundCheckpoint | None = None

    @property
    def device(self) -> str:
        """Torch device string of all training."""
        return self.machine.device


class ClientState(Value):
    """Everything that a client keeps between rounds.

    Attributes:
        parts: the client's latest weights per part, private AND shared.
        extras: further state of the method, by name: moments, moving averages, mixing weights. They never leave the
            device.
    """

    parts: Parts
    extras: Mapping[str, Weights] = field(default_factory=dict)


class Aggregate(Value):
    """What clients download: shared parts and, for some methods, the published label distribution p(y) (length C).

    Attributes:
        sums: on the server, what clients need to open `Part.SEALED`. A client's half gets the opened parts, without
            those whose last sum could not be opened.
    """

    parts: Parts
    label_distribution: tuple[float, ...] | None = None
    sums: tuple[object, ...] = ()


class SharedResult(Value):
    """The half of a local round that may leave the device. A separate type prevents mix-ups."""

    parts: Parts


class LocalResult(Value):
    """What a local round returns: `shared` goes to the firewall, `private` to the private store."""

    shared: SharedResult
    private: ClientState
    report: Report


class Update(Value):
    """One client's decoded and validated update, as passed to an aggregator."""

    client: str
    parts: Parts
    examples: int
    label_counts: tuple[int, ...] | None = None


class Evaluation(Value):
    """Accuracy in [0, 1], mean cross-entropy, number of images, and correct / total per class."""

    accuracy: float
    loss: float
    images: int
    correct_per_class: tuple[int, ...]
    images_per_class: tuple[int, ...]


class ServerState(Value):
    """What the server half keeps between rounds: the current aggregate and named extra tensors, stored with the round."""

    aggregate: Aggregate
    extras: Mapping[str, Weights] = field(default_factory=dict)


class Spill(Protocol):
    """Where an aggregator stores per-client tensors until `finish`: a directory in the service, a dict in a simulation."""

    def put(self, client: str, tensors: Weights) -> None:
        """Store a client's tensors, durably if the store is durable."""

    def get(self, client: str) -> Weights:
        """The tensors of a client."""

    def has(self, client: str) -> bool:
        """Whether `put` was completed for the client."""


class Aggregator(Protocol):
    """The server half of one round attempt."""

    def add(self, update: Update) -> None:
        """Run the teacher pass of one update, spill its rows and count it. Idempotent per client."""

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """Merge exactly these updates. Updates that were not added are loaded one at a time through their callables."""


class LabelCounts(str, Enum):
    """Whether a method's updates report a client's number of images per class. A device's policy takes precedence."""

    NEVER = "never"
    OPTIONAL = "optional"
    REQUIRED = "required"


_SMALL_NETWORKS = NetworkChoice(noise_dim=8)
_SMALL_IMAGES = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.25,))


class Example(Value):
    """Networks and an image form that a method supports. Its laws are tested with them."""

    network: NetworkChoice = _SMALL_NETWORKS
    image: ImageForm = _SMALL_IMAGES


class Payload(Value):
    """The parts of a client: which it uploads, downloads and keeps private.

    Attributes:
        up: parts of every update.
        down: parts of the aggregate.
        private: parts that the client trains and never shares.
        continued: parts whose training continues from the aggregate's weights; None: all downloaded parts. Updates of
            other parts are not coded as a difference to the aggregate.
        statistics: (plan or spec) -> the layout of the part `statistics`, with bounds; None for a method without that part.
        sealed: parts of `up` whose weighted mean only the clients may know; a single client's stays unreadable to all.
            They are averaged separately: the updates of the method's `aggregator` do not hold them.
        sealable: further parts that the server half only averages, so that a plan can seal them.
        alternates: whether rounds 2, 4, 6, ... exchange only `statistics`, computed from the unchanged aggregate
            without training, and the others everything else. Parts that a round does not exchange stay unchanged in the
            aggregate.
    """

    up: frozenset[Part]
    down: frozenset[Part]
    private: frozenset[Part] = frozenset()
    continued: frozenset[Part] | None = None
    statistics: Callable[[NetworkSpec], tuple[TensorLayout, ...]] | None = None
    sealed: frozenset[Part] = frozenset()
    sealable: frozenset[Part] = frozenset()
    alternates: bool = False

    def __post_init__(self) -> None:
        """Check the sealed parts.

        Raises:
            ValueError: a sealed part is not both uploaded and downloaded, or there are no statistics to alternate with.
        """
        if self.sealed - (self.up & self.down):
            raise ValueError("sealed parts are averaged: list them in both payload.up and payload.down")
        if self.alternates and Part.STATISTICS not in self.up:
            raise ValueError("alternates needs the part statistics: add it to payload.up, or leave alternates out")

    @property
    def parts(self) -> frozenset[Part]:
        """All parts of a client."""
        return self.up | self.private | self.down

    @property
    def with_base(self) -> frozenset[Part]:
        """Parts of an update that are close to the round's starting aggregate."""
        return self.up & (self.down if self.continued is None else self.continued)


class Needs(Value):
    """The requirements of a method.

    Attributes:
        label_counts: a device that does not allow them omits `OPTIONAL` ones, and declines rounds with `REQUIRED` ones.
        public: whether the server half needs `RoundContext.public`.
        cohort: whether clients need the cohort's secret.
        networks: (plan or spec) -> why the method does not support its networks, as a sentence with the setting to
            change, or nothing; called when a federation is planned.
    """

    label_counts: LabelCounts = LabelCounts.NEVER
    public: bool = False
    cohort: bool = False
    networks: Callable[[NetworkSpec], str] = lambda spec: ""


class Personal(Value):
    """A client's personal model.

    Attributes:
        parts: the parts of the model.
        predict: (spec, those parts) -> the model, from normalised images [B, C, H, W] float32 to logits [B, classes],
            used for evaluation, gates and export. None: extractor followed by classifier.
        align: (a client's own parts, aggregate, training images, context of the round after the aggregate's) -> parts
            that a download changes in addition to, or instead of, those of the aggregate; used to evaluate, export or
            further train a downloaded model. None: a download only replaces the parts that it holds.
    """

    parts: frozenset[Part] = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})
    predict: Callable[[NetworkSpec, Parts], nn.Module] | None = None
    align: Callable[[Parts, Aggregate, ImageSet, RoundContext], Parts] | None = None


class Method(Value):
    """A federated method: both halves, parameters and payload in one value.

    Attributes:
        client_start: (spec, initial) -> the state of a new client; `initial` gives every part's initial weights. None: those weights.
        server_start: (spec, initial) -> the first aggregate and the server's state. None: the initial weights of the
            downloaded parts.
        private_stages: how many stages of a local round train with DP-SGD if it is enabled (`RoundContext.privacy`),
            each with `private_step_count` steps. Together they must be ALL stages that see images or labels. 0: DP-SGD
            can't cover the method.
        takes_trainer: whether its clients may train their own task with a `fedcg.Trainer`. Such a method only averages
            what they share.
        example: input of the tests of its laws; must satisfy `Needs.networks`.
        vote: (state, aggregate, training images, context) -> bits from 0 to 255 that all clients of the next sealed sum see (`Cohort.votes`). None: 0.
    """

    name: str
    title: str
    params_type: type[TrainingParams]
    payload: Payload
    local_round: Callable[[ClientState, ImageSet, Aggregate | None, RoundContext], LocalResult]
    aggregator: Callable[[ServerState, RoundContext, Spill], Aggregator]
    client_start: Callable[[FederationSpec, Parts], ClientState] | None = None
    server_start: Callable[[FederationSpec, Parts], ServerState] | None = None
    needs: Needs = Needs()
    personal: Personal = Personal()
    private_stages: int = 0
    takes_trainer: bool = False
    example: Example = Example()
    vote: Callable[[ClientState, Aggregate, ImageSet, RoundContext], int] | None = None

    def __post_init__(self) -> None:
        """Check that the fields are consistent.

        Raises:
            ValueError: names the field.
        """
        if not (isinstance(self.params_type, type) and issubclass(self.params_type, TrainingParams)):
            raise ValueError("params_type must be a subclass of TrainingParams")  # noqa: TRY004 - a bad field, like the one below
        if missing := sorted(part.value for part in self.personal.parts - self.payload.parts):
            raise ValueError(
                f"a client's model needs {', '.join(missing)}: share it in payload.up or payload.down, keep it in payload.private, or "
                "name the parts of the model in personal.parts"
            )

    def init_client(self, spec: FederationSpec, initial: Parts) -> ClientState:
        """The state of a new client."""
        if self.client_start is not None:
            return self.client_start(spec, initial)
        return ClientState({part: initial[part] for part in sorted(self.payload.parts)})

    def init_server(self, spec: FederationSpec, initial: Parts) -> ServerState:
        """The server's state before the first round. All clients start from the same aggregate, except for sealed parts."""
        if self.server_start is not None:
            return self.server_start(spec, initial)
        return ServerState(Aggregate({part: initial[part] for part in sorted(self.payload.down & initial.keys())}))
