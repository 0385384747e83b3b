"""Outputs on the probes as whole numbers, and their sum over clients: what fedprobe shares as the part `statistics`.

A client sends round(scale · c · U), with U its extractor's outputs, cut to [0, clip], and c its weight, and c itself; the aggregate has the
sums of both, so that Σ c U / Σ c is the weighted mean. Whole numbers add up to the same sum in any order, and modulo 2³² behind masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    Aux,
    Average,
    DivergedError,
    ServerMomentum,
    ServerState,
    TrainingParams,
    Unmasking,
    Update,
    Weights,
    silent,
)
from fedcg.learning.networks.assembly import feature_shape
from fedcg.learning.spec import NetworkSpec
from fedcg.wire.parts import SUM_NUMBERS, SUM_WEIGHT, Part, TensorLayout

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
