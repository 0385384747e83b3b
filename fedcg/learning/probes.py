"""Probe images that a cohort's secret makes, the whole-number sums of extractors' outputs on them, and extractors fitted to their mean.

No image holds anybody's data: dead leaves (Lee, Mumford & Huang 2001) over 1/f noise. Numbers are round(scale · c · U) with the weight c, so that sums are exact in any order, and modulo 2^32 behind masks.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from pydantic import Field, model_validator
from torch import nn
from typing_extensions import Self

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    Aux,
    Average,
    DivergedError,
    RoundContext,
    ServerMomentum,
    ServerState,
    TrainingParams,
    Unmasking,
    Update,
    Weights,
    silent,
)
from fedcg.learning.networks.assembly import feature_shape
from fedcg.learning.networks.own_backbone import with_features
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ImageForm, NetworkSpec
from fedcg.learning.training.optimisers import adam
from fedcg.wire.parts import SUM_NUMBERS, SUM_WEIGHT, Part, TensorLayout

LEAVES = 24
SMALLEST, LARGEST = 0.08, 0.5
"""Radii of the discs, as shares of the longer side; their density falls with the third power."""
_TEXTURE = 0.35


def probe_images(streams: Streams, count: int, form: ImageForm) -> torch.Tensor:
    """Images that all who hold a secret draw alike.

    Args:
        streams: of the cohort's secret.
        count: how many.
        form: of the federation's images.

    Returns:
        [count, C, H, W] uint8.
    """
    stream = streams.generator("probes")
    size = count, form.channels, form.height, form.width
    images, texture = _noise(size, stream), _noise(size, stream)
    for _ in range(LEAVES):
        disc, colour = _disc(size, stream), torch.rand(count, form.channels, 1, 1, generator=stream)
        leaf = colour + _TEXTURE * (texture - 0.5)
        images = torch.where(disc, leaf, images)
    return (255.0 * images).clamp(0.0, 255.0).round().to(torch.uint8)


def _noise(size: tuple[int, int, int, int], stream: torch.Generator) -> torch.Tensor:
    """Octaves of random grids, each of half the amplitude of the coarser one; every image from 0 to 1."""
    count, channels, height, width = size
    total, cells, weight = torch.zeros(size), 2, 1.0
    while cells <= max(height, width):
        grid = torch.rand(count, channels, cells, cells, generator=stream)
        total += weight * F.interpolate(grid, (height, width), mode="bilinear", align_corners=False)
        cells, weight = 2 * cells, weight / 2
    low, high = (bound(total, (1, 2, 3), keepdim=True) for bound in (torch.amin, torch.amax))
    return (total - low) / (high - low)


def _disc(size: tuple[int, int, int, int], stream: torch.Generator) -> torch.Tensor:
    """One disc per image, [N, 1, H, W] bool."""
    count, _, height, width = size
    side = max(height, width)
    drawn = torch.rand(3, count, 1, 1, 1, generator=stream)
    radius = SMALLEST / torch.sqrt(1.0 - drawn[0] * (1.0 - (SMALLEST / LARGEST) ** 2))
    down = (torch.arange(height).view(-1, 1) / side - drawn[1] * height / side).square()
    across = (torch.arange(width).view(1, -1) / side - drawn[2] * width / side).square()
    return down + across < radius.square()


_MOST_KINDS = 100


def probe_inputs(ctx: RoundContext, count: int) -> torch.Tensor:
    """The cohort's probes as the extractor takes them, on the context's device; a frozen backbone's features where they stand for images."""
    assert ctx.masking.cohort is not None  # methods with probes need the secret
    images = probe_images(ctx.masking.cohort, count, ctx.spec.image)
    unlabelled = ImageSet(images, torch.zeros(count, dtype=torch.int64), ctx.spec.classes)
    (made,) = with_features(ctx.spec, [unlabelled], ctx.device)
    return normalise(made.images.to(ctx.device), ctx.spec.image)


@torch.no_grad()
def outputs_on(extractor: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """[M, D] float32 on the CPU; `extractor` is left in evaluation mode."""
    features: torch.Tensor = extractor.eval()(inputs)
    return features.flatten(1).float().cpu()


def residual(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean squared difference, in variances of what is wanted: 1 for the best constant of each feature."""
    spread = (wanted - wanted.mean(0)).square().mean().clamp(min=1e-8)
    return (outputs - wanted).square().mean() / spread


def distance(own: torch.Tensor, mean: torch.Tensor) -> float:
    """Of a mean from the own outputs [M, D]: the squared difference in variances of the one that varies more.

    Backbones of different kinds have a mean that varies less than each of them: n of them have an n-th. One that hardly varies is of no
    extractors: infinitely far away.
    """
    of_own, of_mean = (float((some - some.mean(0)).square().mean()) for some in (own, mean))
    if of_mean < of_own / _MOST_KINDS:
        return math.inf
    return float((own - mean).square().mean()) / max(of_own, of_mean, 1e-8)


def fit(
    extractor: nn.Module,
    inputs: torch.Tensor,
    wanted: torch.Tensor,
    steps: int,
    lr: float,
    until: float,
    ctx: RoundContext,
) -> tuple[float, float]:
    """Adam on the residual, all probes at once, batch norm's statistics as they are; until `until`, at most `steps` steps.

    Returns:
        The residual before and after.
    """
    extractor.eval()
    wanted = wanted.to(ctx.device)
    optimiser = adam([one for one in extractor.parameters() if one.requires_grad], lr, 0.0)
    first = found = float("nan")
    for done in range(steps + 1):
        loss = residual(extractor(inputs).flatten(1), wanted)
        found = float(loss.detach())
        first = found if done == 0 else first
        if not found > until or done == steps:  # a loss that is not a number ends it, too
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        ctx.callbacks.progress("align", done + 1, steps)
    return first, found


OUTPUTS, WEIGHT = SUM_NUMBERS, SUM_WEIGHT
MODULUS = 1 << 32


class ProbeParams(TrainingParams):
    """Parameters of methods that send outputs on probes."""

    average: Average = "mean"
    aux: Aux = 0.0
    server_momentum: ServerMomentum = 0.0
    probes: int = Field(
        default=32,
        ge=2,
        le=4096,
        description="images that the cohort's secret makes; 128 for networks of few features, such as cnn_bn",
    )
    clip: float = Field(default=16.0, gt=0, description="highest output that is told")
    scale: int = Field(default=32, ge=1, description="steps of an output of 1, times a client's weight")
    weight_cap: int = Field(
        default=1024, ge=1, description="highest weight of a client, otherwise its number of images"
    )
    most_clients: int = Field(
        default=64, ge=32, description="clients of a round, for whom sums stay exact; a masked sum has 32 at most"
    )

    @model_validator(mode="after")
    def _sums_fit(self) -> Self:
        highest = self.most_clients * self.weight_cap * self.clip * self.scale
        if highest >= MODULUS // 2:
            raise ValueError(
                f"most_clients · weight_cap · clip · scale = {highest:.3g}, and sums stay exact below 2^31: lower one of them"
            )
        return self

    @classmethod
    def of(cls, spec: NetworkSpec) -> Self:
        """Of a spec, whose method may have more."""
        return cls.model_validate({name: value for name, value in spec.params.items() if name in cls.model_fields})

    def weight_of(self, images: int) -> int:
        """The weight of a client with so many training images."""
        return min(images, self.weight_cap)


def sums_layout(spec: NetworkSpec) -> tuple[TensorLayout, ...]:
    """`outputs` [M, D], whole numbers, and `weight`; D numbers are a feature."""
    params = ProbeParams.of(spec)
    size = math.prod(feature_shape(spec))
    most = float(params.most_clients * params.weight_cap)
    return (
        TensorLayout(name=OUTPUTS, dtype="int64", shape=(params.probes, size), low=0.0, high=float(MODULUS - 1)),
        TensorLayout(name=WEIGHT, dtype="int64", shape=(), low=0.0, high=most),
    )


def counted(outputs: torch.Tensor, images: int, params: ProbeParams) -> dict[str, torch.Tensor]:
    """A client's share of the sums: its outputs [M, ...] with the weight of `images`."""
    weight = params.weight_of(images)
    numbers = (outputs.flatten(1).double().clamp(0.0, params.clip) * (params.scale * weight)).round().long()
    return {OUTPUTS: numbers, WEIGHT: torch.tensor(weight)}


def mean_outputs(sums: Weights, params: ProbeParams) -> torch.Tensor | None:
    """Σ c U / Σ c, [M, D] float32; None where nobody has told any.

    Raises:
        DivergedError: it is no mean of outputs in [0, clip]: a client told more than it may.
    """
    weight = int(sums[WEIGHT])
    if weight == 0:
        return None
    mean = (sums[OUTPUTS].double() / (params.scale * weight)).float()
    if float(mean.max()) > params.clip + 1.0:
        raise DivergedError(
            f"the mean of outputs on the probes reaches {float(mean.max()):.3g}, beyond {params.clip:g}"
        )
    return mean


class WithProbeSums:
    """A server half beside which the clients' probe sums are added up.

    Args:
        inner: what is done with everything else.
        params: of the method.
        unmasking: opens the sum; None: the numbers are not masked. Without a correction the aggregate has none.
        warn: told why an aggregate has none although there is a correction.
    """

    def __init__(
        self,
        inner: Aggregator,
        params: ProbeParams,
        unmasking: Callable[[], Unmasking | None] = silent,
        warn: Callable[[str], None] = lambda _sentence: None,
    ) -> None:
        self._inner, self._params, self._unmasking, self._warn = inner, params, unmasking, warn

    def add(self, update: Update) -> None:
        """Count an update, without its sums."""
        self._inner.add(update)

    def finish(self, updates: Mapping[str, Callable[[], Update]]) -> tuple[Aggregate, ServerState]:
        """The aggregate of exactly these updates.

        Raises:
            DivergedError: more clients than unmasked sums stay exact for, or one that counts for more than its cap there.
        """
        unmasking = self._unmasking()
        if unmasking is None and len(updates) > self._params.most_clients:
            raise DivergedError(
                f"{len(updates)} clients, and sums are exact for {self._params.most_clients}: raise most_clients"
            )
        aggregate, state = self._inner.finish(updates)
        sums = self._plain(updates) if unmasking is None else self._opened(unmasking, updates)
        merged = Aggregate({**aggregate.parts, Part.STATISTICS: sums}, aggregate.label_distribution)
        return merged, ServerState(merged, state.extras)

    def _plain(self, updates: Mapping[str, Callable[[], Update]]) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        for client in sorted(updates):
            told = updates[client]().parts[Part.STATISTICS]
            self._check(client, int(told[WEIGHT]))
            sums = {name: told[name] + sums.get(name, 0) for name in told}
        return {**sums, OUTPUTS: sums[OUTPUTS] % MODULUS}

    def _opened(self, unmasking: Unmasking, updates: Mapping[str, Callable[[], Update]]) -> dict[str, torch.Tensor]:
        weights, correction = unmasking.weights, unmasking.correction
        empty = next(iter(updates.values()))().parts[Part.STATISTICS]
        nothing = {name: torch.zeros_like(tensor) for name, tensor in empty.items()}
        if correction is None:
            return nothing
        told = {client: updates[client]().parts[Part.STATISTICS] for client in sorted(weights.keys() & updates.keys())}
        unlike = [name for name in sorted(weights) if name not in told or int(told[name][WEIGHT]) != weights[name]]
        if unlike:
            self._warn(
                "the sum has clients whose updates are not merged, or tell another weight than they announced: "
                + ", ".join(unlike)
            )
            return nothing
        numbers = torch.stack([one[OUTPUTS] for one in told.values()]).sum(0)
        opened = (numbers + correction.view_as(numbers)) % MODULUS
        return {OUTPUTS: opened, WEIGHT: torch.tensor(sum(weights.values()))}

    def _check(self, client: str, weight: int) -> None:
        if not 0 < weight <= self._params.weight_cap:
            raise DivergedError(f"{client}: its weight {weight} is not of 1 to {self._params.weight_cap}")
