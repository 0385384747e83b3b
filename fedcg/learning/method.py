"""The contract of a federated method: one value that holds both halves of an algorithm.

The caller (trainer, aggregation worker, simulation) never asks for a method's name; it calls these functions.
Laws (tested over every method that is installed, with its `example`; `docs/how-to/add-a-method.md` explains them):
  * `local_round` with the same state, data, aggregate and streams returns the same result bit for bit on one CPU;
  * `LocalResult.shared` holds exactly the parts of `payload.up` that the round exchanges; `private` holds every part of the client; both in storage of their own;
  * `local_round` changes neither the state nor the aggregate nor the data that it is given;
  * `finish` does not depend on the order of `add`, nor on `add` having been called for a client, or more than once;
  * a loss that is not finite raises `DivergedError`, and fewer than two training images raise `DataError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from fedcg.config_file import Settings
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, NetworkSpec
from fedcg.wire.parts import Part, Report, TensorLayout

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedcg.learning.image_set import ImageSet
    from fedcg.learning.round_checkpoint import RoundCheckpoint

    Weights = Mapping[str, torch.Tensor]
else:
    Weights = Mapping[str, Any]

Progress = Callable[[str, int, int], None]
Precision = Literal["f32", "bf16"]
Combination = Literal["mean", "median", "trimmed"]
"""How the clients' numbers become one: weighted by examples, or by a statistic that a minority does not move far."""


class DivergedError(Exception):
    """A local round or a distillation produced NaN or an exploding loss; the state before it still stands."""


def check_finite(parts: Mapping[Part, Weights], what: str) -> None:
    """Check weights that no loss has been computed with, such as those after the last step.

    Raises:
        DivergedError: a number is not finite; names `what` and the tensor.
    """
    for part, weights in parts.items():
        for name, tensor in weights.items():
            if not bool(tensor.isfinite().all()):
                raise DivergedError(f"{what}: {part.value}/{name} is not finite; the state before still stands")


class TrainingParams(Settings):
    """Parameters that every method has; each method's own params extend these. Unknown keys are errors."""

    epochs: int = Field(default=20, ge=1, description="local epochs a round")
    steps: int = Field(default=0, ge=0, description="local steps a round; 0 counts by epochs instead")
    batch_size: int = Field(default=16, ge=2, description="local batch size")
    optimiser: str = Field(default="adam", pattern="^(adam|sgd)$", description="optimiser of extractor and classifier")
    lr: float = Field(default=3e-4, gt=0, description="learning rate of extractor and classifier")
    weight_decay: float = Field(default=1e-4, ge=0, description="of the optimiser of extractor and classifier")
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        exclude_if=lambda ema: ema == 0.0,
        description="decay of a moving average of the client's model over a round's steps, a further candidate of the final choice",
    )

    @property
    def needs_label_counts(self) -> bool:
        """Whether, at these values, a method whose label counts are `OPTIONAL` can't do without them."""
        return False


# Parameters that several methods have, each with the default beside its name. Specs that leave one out keep the digest that they had
# before it existed.
Average = Annotated[
    Combination,
    Field(
        exclude_if=lambda average: average == "mean",
        description="of the clients' weights: mean by examples, or median or trimmed mean of every number, each client once",
    ),
]
Aux = Annotated[
    float,
    Field(
        ge=0,
        exclude_if=lambda aux: aux == 0.0,
        description="weight of a second cross-entropy, through the downloaded classifier, which stays as it came; from round 2 on",
    ),
]
ServerMomentum = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        exclude_if=lambda momentum: momentum == 0.0,
        description="of the averaged classifier from round to round (FedAvgM, Hsu et al. 2019, for that part alone)",
    ),
]
Taught = Annotated[
    Literal["sum", "standardised", "median", "trimmed"],
    Field(
        exclude_if=lambda ensemble: ensemble == "sum",
        description="of the teachers' outputs: weighted sum of logits; the same with every teacher scaled alike (standardised); "
        "median or trimmed mean of log-probabilities, each teacher once",
    ),
]


def silent(*_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True)
class Machine:
    """What a half of a method runs on.

    Attributes:
        device: torch device string.
        precision: of training steps; "bf16" for CUDA devices (see `precision`).
        graphs: whether training steps on a CUDA device may run as CUDA graphs.
        most_rows: rows that go through a teacher, or forth and back through the networks of a training step, at once, where memory is short;
            None: as many as are fast. Other last digits.
    """

    device: str = "cpu"
    precision: Precision = "f32"
    graphs: bool = True
    most_rows: int | None = None


@dataclass(frozen=True)
class Callbacks:
    """Where a half of a method reports to.

    Attributes:
        progress: called with (phase, step, steps); phases are "classify", "generate", "calibrate", "teacher", "distil",
            "evaluate".
        watch_loss: called with the mean loss of the last steps of "distil", at intervals, each time before the `progress` of its step.
        warn: called with a sentence for the owner of the device.
    """

    progress: Progress = silent
    watch_loss: Callable[[float], None] = silent
    warn: Callable[[str], None] = silent


@dataclass(frozen=True)
class Cohort:
    """What the clients have in common, and the server does not know.

    Attributes:
        streams: randomness of the cohort's secret, scoped to the federation: alike on all clients. None on a server, or where there is no
            secret.
        votes: by client, the bits that it gave (`Method.vote`) before the round's sealed sum, seen alike by all that are in it; empty where
            there is no sum.
        changed: whether an earlier sealed sum of the round's parts had other clients. Statistics that hardly move between rounds are then to be
            of a fresh random half of the images: else a client's could be read from the difference of two sums, and it would sit out.
    """

    streams: Streams | None = None
    votes: Mapping[str, int] = field(default_factory=dict)
    changed: bool = False


@dataclass(frozen=True)
class RoundContext:
    """What a half of a method may use besides its state and data.

    Attributes:
        spec: the federation's spec; `round` counts from 1, to `spec.rounds` unless the federation is prolonged.
        streams: scoped to (federation, round, attempt) already.
        public: unlabelled images, [N, C, H, W] uint8, that the server half may use; None where there are none.
        validation: the client's validation images, to choose by and never to train on; None on a server, or where a client has none.
        privacy: this client's mechanisms; all off by default. A server half has none.
        checkpoint: keeps the state inside a local round; None: a round that is killed begins anew.
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


@dataclass(frozen=True)
class ClientState:
    """All that a client keeps between rounds.

    Attributes:
        parts: weights per part, its own latest ones, private AND shared.
        extras: what else its method remembers, by name: moments, moving averages, mixing weights. They never leave.
    """

    parts: Mapping[Part, Weights]
    extras: Mapping[str, Weights] = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregate:
    """What comes down: shared parts and, where a method wants it, the published label distribution p(y) (length C).

    Attributes:
        sums: on the server, what clients open `Part.SEALED` with; a client's half gets the sealed parts themselves, or lacks those
            whose last sum could not be opened.
    """

    parts: Mapping[Part, Weights]
    label_distribution: tuple[float, ...] | None = None
    sums: tuple[object, ...] = ()


@dataclass(frozen=True)
class SharedResult:
    """The half of a local round that may leave the box; a type of its own so that it can't be mixed up."""

    parts: Mapping[Part, Weights]


@dataclass(frozen=True)
class LocalResult:
    """What a local round returns: `shared` goes to the firewall, `private` to the private store."""

    shared: SharedResult
    private: ClientState
    report: Report


@dataclass(frozen=True)
class Update:
    """One client's decoded and validated update, as an aggregator gets it."""

    client: str
    parts: Mapping[Part, Weights]
    examples: int
    label_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in [0, 1], mean cross-entropy, number of images, and correct / total per class."""

    accuracy: float
    loss: float
    images: int
    correct_per_class: tuple[int, ...]
    images_per_class: tuple[int, ...]


@dataclass(frozen=True)
class ServerState:
    """What the server half keeps between rounds: the current aggregate and named extra tensors, stored with the round."""

    aggregate: Aggregate
    extras: Mapping[str, Weights] = field(default_factory=dict)


class Spill(Protocol):
    """Where an aggregator keeps per-client tensors until `finish`; a directory in the service, a dict in a simulation."""

    def put(self, client: str, tensors: Weights) -> None:
        """Keep tensors of a client, durably where the store is durable."""

    def get(self, client: str) -> Weights:
        """The tensors of a client."""

    def has(self, client: str) -> bool:
        """Whether `put` was completed for the client."""


class Aggregator(Protocol):
    """The server half of one round attempt."""

    def add(self, update: Update) -> None:
        """Do the teacher pass of one update, spill its rows and count it. Idempotent per client."""

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """Merge exactly these updates; loads those that were not added, one at a time, through their callables."""


class LabelCounts(str, Enum):
    """Whether a method's updates report how many images of each class a client has; a device's policy stands above it."""

    NEVER = "never"
    OPTIONAL = "optional"
    REQUIRED = "required"


_SMALL_NETWORKS = NetworkChoice(noise_dim=8)
_SMALL_IMAGES = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.25,))


@dataclass(frozen=True)
class Example:
    """Networks and a form of images that a method can work with; its laws are tested with them."""

    network: NetworkChoice = _SMALL_NETWORKS
    image: ImageForm = _SMALL_IMAGES


@dataclass(frozen=True)
class Payload:
    """The parts of a client: what goes up, what comes down, what stays.

    Attributes:
        up: parts of every update.
        down: parts of the aggregate.
        private: parts that the client trains and never shares.
        continued: parts that a local round goes on training from the aggregate's weights; None: all that come down. Updates of others
            are not coded as the difference to it.
        statistics: (plan or spec) -> the layout of the part `statistics`, with bounds; None for a method without that part.
        sealed: parts of `up` of which only the clients may know the weighted mean, and nobody a single client's. They are averaged beside
            the method's `aggregator`, whose updates do not hold them.
        sealable: further parts that the server half does nothing with but average them: a plan may seal them.
        alternates: whether rounds 2, 4, 6, ... exchange `statistics` alone, of the aggregate as it came and without training; the others
            everything else. Parts of the aggregate that a round does not bring stay as they were.
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
        """Check what is sealed.

        Raises:
            ValueError: it does not go up and come down, or there are no statistics to alternate with.
        """
        if self.sealed - (self.up & self.down):
            raise ValueError("sealed parts are averaged: they have to go up and come down")
        if self.alternates and Part.STATISTICS not in self.up:
            raise ValueError("every second round exchanges the part statistics: share it, or leave alternates out")

    @property
    def parts(self) -> frozenset[Part]:
        """Every part that a client has."""
        return self.up | self.private | self.down

    @property
    def with_base(self) -> frozenset[Part]:
        """Parts of an update that lie near the aggregate which the round started from."""
        return self.up & (self.down if self.continued is None else self.continued)


@dataclass(frozen=True)
class Needs:
    """What a method can't do without.

    Attributes:
        label_counts: `OPTIONAL` ones are left out where a device does not allow them; without `REQUIRED` ones it declines.
        public: whether the server half needs `RoundContext.public`.
        cohort: whether clients need the cohort's secret.
        networks: (plan or spec) -> why the method can't work with its networks, as a sentence with the setting to change, or nothing;
            asked when a federation is planned.
    """

    label_counts: LabelCounts = LabelCounts.NEVER
    public: bool = False
    cohort: bool = False
    networks: Callable[[NetworkSpec], str] = lambda spec: ""


@dataclass(frozen=True)
class Personal:
    """A client's model.

    Attributes:
        parts: that it is made of.
        predict: (spec, those parts) -> the model, from images [B, C, H, W] float32, normalised, to logits [B, classes]; evaluation, gates and
            export use it alike. None: the classifier on the extractor.
        align: (a client's own parts, aggregate, training images, context of the round after the aggregate's) -> parts that a download
            changes beside those of the aggregate, or in their place; what measures, exports or trains on from a downloaded model uses them.
            None: a download replaces the parts that it holds, and that is all.
    """

    parts: frozenset[Part] = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})
    predict: Callable[[NetworkSpec, Mapping[Part, Weights]], nn.Module] | None = None
    align: Callable[[Mapping[Part, Weights], Aggregate, ImageSet, RoundContext], Mapping[Part, Weights]] | None = None


@dataclass(frozen=True)
class Method:
    """A federated method. Both halves, its parameters and its payload in one value.

    Attributes:
        client_start: (spec, initial) -> the state of a new client; `initial` gives every part's initial weights. None: those weights.
        server_start: (spec, initial) -> the first aggregate, and what the server keeps. None: the initial weights of what comes down.
        private_stages: how many stages of a local round train a network with DP-SGD where it is asked for (`RoundContext.privacy`),
            each of `private_step_count` steps; together they are ALL that see images or labels. 0: DP-SGD can't cover the method.
        takes_trainer: whether its clients may train a task of their own, by a `fedcg.Trainer`: it only averages what they share.
        example: what its laws are tested with; it has to fit `Needs.networks`.
        vote: (state, aggregate, training images, context) -> bits from 0 to 255 that all clients of the next sealed sum see (`Cohort.votes`). None: 0.
    """

    name: str
    title: str
    params_type: type[TrainingParams]
    payload: Payload
    local_round: Callable[[ClientState, ImageSet, Aggregate | None, RoundContext], LocalResult]
    aggregator: Callable[[ServerState, RoundContext, Spill], Aggregator]
    client_start: Callable[[FederationSpec, Mapping[Part, Weights]], ClientState] | None = None
    server_start: Callable[[FederationSpec, Mapping[Part, Weights]], ServerState] | None = None
    needs: Needs = Needs()
    personal: Personal = Personal()
    private_stages: int = 0
    takes_trainer: bool = False
    example: Example = Example()
    vote: Callable[[ClientState, Aggregate, ImageSet, RoundContext], int] | None = None

    def __post_init__(self) -> None:
        """Check that what the method names fits together.

        Raises:
            ValueError: names the field.
        """
        if not (isinstance(self.params_type, type) and issubclass(self.params_type, TrainingParams)):
            raise ValueError("params_type has to be a class that extends TrainingParams")  # noqa: TRY004 - a value of a method, as the one below
        if missing := sorted(part.value for part in self.personal.parts - self.payload.parts):
            raise ValueError(
                f"a client's model needs {', '.join(missing)}: share it in payload.up or payload.down, keep it in payload.private, or "
                "name the parts of the model in personal.parts"
            )

    def init_client(self, spec: FederationSpec, initial: Mapping[Part, Weights]) -> ClientState:
        """The state of a new client."""
        if self.client_start is not None:
            return self.client_start(spec, initial)
        return ClientState({part: initial[part] for part in sorted(self.payload.parts)})

    def init_server(self, spec: FederationSpec, initial: Mapping[Part, Weights]) -> ServerState:
        """The server's state before the first round: everyone starts from the same aggregate, sealed parts that it does not know aside."""
        if self.server_start is not None:
            return self.server_start(spec, initial)
        return ServerState(Aggregate({part: initial[part] for part in sorted(self.payload.down & initial.keys())}))
