"""What one other box of the cohort gives to an attacker: the cohort's secret, and with it an extractor that is as near to all as can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from audit.errors import DecodeError
from fedcg.learning.errors import LearningError
from fedcg.learning.method import Aggregate, Masking, RoundContext, Weights
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.probes import WEIGHT, ProbeParams, counted, fit, mean_outputs, outputs_on, probe_inputs
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

_SECRET_BYTES, _CHECK_BYTES = 32, 32
_RATE, _UNTIL = 1e-3, 1e-5


@dataclass(frozen=True)
class Colluder:
    """A box of the cohort that tells all it has.

    Attributes:
        secret: the cohort's.
        extractor: fitted to the mean outputs of the round, as every box fits its own; without such, the cohort's start.
        steps: of a fit to outputs on the probes, at most.
    """

    spec: FederationSpec
    secret: bytes
    extractor: Weights = field(default_factory=dict)
    steps: int = 2000

    @classmethod
    def of(cls, spec: FederationSpec, secret: bytes, aggregate: Aggregate | None, steps: int = 2000) -> Colluder:
        """Who knows the secret, and the aggregate that a round ended with."""
        bare = cls(spec, secret, steps=steps)
        mean = bare.mean(aggregate)
        return replace(bare, extractor=bare.start() if mean is None else bare.fitted(mean))

    @property
    def has_probes(self) -> bool:
        """Whether the method adds up outputs on the cohort's probes."""
        return Part.STATISTICS in get_method(self.spec.method).payload.summed

    def start(self) -> Weights:
        """What the extractors of the whole cohort started from."""
        return initial_parts(self.spec, self.secret)[Part.EXTRACTOR]

    def mean(self, aggregate: Aggregate | None) -> torch.Tensor | None:
        """The mean outputs in an aggregate, [M, D]; None where it has none."""
        if aggregate is None or not self.has_probes:
            return None
        return self._mean_of(aggregate.parts[Part.STATISTICS])

    def mean_without(self, aggregate: Aggregate, extractor: Weights, images: int) -> torch.Tensor | None:
        """The mean outputs in an aggregate, but for those of a device with this extractor and so many training images."""
        own = self.counted(extractor, images)
        sums = aggregate.parts[Part.STATISTICS]
        return self._mean_of({name: sums[name] - own[name] for name in own})

    def counted(self, extractor: Weights, images: int) -> Weights:
        """What a device with this extractor and so many training images adds to the sums."""
        return counted(self.outputs(extractor), images, self._params)

    def weight(self, aggregate: Aggregate) -> int:
        """Of all devices in an aggregate's sums."""
        return int(aggregate.parts[Part.STATISTICS][WEIGHT])

    def weight_of(self, images: int) -> int:
        """Of a device with so many training images."""
        return self._params.weight_of(images)

    def outputs(self, extractor: Weights) -> torch.Tensor:
        """An extractor's outputs on the probes, [M, D]."""
        return outputs_on(load_part(self.spec, Part.EXTRACTOR, extractor), self._probes())

    def fitted(self, outputs: torch.Tensor) -> Weights:
        """An extractor from the cohort's start that has these outputs on the probes."""
        extractor = load_part(self.spec, Part.EXTRACTOR, self.start())
        fit(extractor, self._probes(), outputs, self.steps, _RATE, _UNTIL, self._context())
        return weights_of(extractor)

    @property
    def _params(self) -> ProbeParams:
        return ProbeParams.of(self.spec)

    def _mean_of(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        try:
            return mean_outputs(sums, self._params)
        except LearningError:  # somebody told more than it may; the devices do not believe it either
            return None

    def _context(self) -> RoundContext:
        streams = Streams(self.secret).at(self.spec.federation)
        return RoundContext(self.spec, 1, 1, streams, masking=Masking(streams))

    def _probes(self) -> torch.Tensor:
        return probe_inputs(self._context(), self._params.probes)


def read_secret(path: Path) -> bytes:
    """The cohort's secret: of a device (`secrets/cohort.key` in its store), or of a simulation (`initial.json` beside its recording).

    Raises:
        DecodeError: the file can't be read, or holds none.
    """
    try:
        data = path.read_bytes()
        if data[:1] != b"{" and _SECRET_BYTES <= len(data) <= _SECRET_BYTES + _CHECK_BYTES:
            return data[:_SECRET_BYTES]
        root = json.loads(data)["cohort_root"]
        if root is not None:
            return bytes.fromhex(root)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DecodeError(
            f"{path} holds no cohort's secret ({error}): give secrets/cohort.key of an agent's store (decrypted), or initial.json "
            "of a simulation's recording"
        ) from error
    raise DecodeError(f"{path}: the clients of this simulation have no common start; run it with --start cohort")
