"""What the wire does to the numbers of a simulation: its updates and aggregates are packed and unpacked as a deployment's are. Uses torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedcg.learning.method import DivergedError, Weights
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, codecs_for, pack, unpack
from fedcg.wire.errors import WireError
from fedcg.wire.messages.messages import COORDINATOR
from fedcg.wire.parts import Part, UpdateCodec

_BASE = "0" * 64  # whichever aggregate: a simulation has no other


@dataclass(frozen=True)
class WireCoding:
    """The codecs of a spec, applied in memory."""

    spec: FederationSpec

    def aggregate(self, parts: Mapping[Part, Weights]) -> tuple[Mapping[Part, Weights], int]:
        """An aggregate as both sides have it, and the size of its artifact."""
        return self._through("aggregate", COORDINATOR, parts, self.spec.aggregate_codec, None)

    def update(
        self, client: str, parts: Mapping[Part, Weights], base: Mapping[Part, Weights]
    ) -> tuple[Mapping[Part, Weights], int]:
        """An update as the server decodes it, and the size of its artifact."""
        known = {part: base[part] for part in self.spec.with_base}
        return self._through("update", client, parts, self.spec.codec, Base(_BASE, to_arrays(known)) if known else None)

    def _through(
        self,
        kind: Literal["update", "aggregate"],
        sender: str,
        parts: Mapping[Part, Weights],
        codec: UpdateCodec,
        base: Base | None,
    ) -> tuple[Mapping[Part, Weights], int]:
        spec = self.spec
        header = ArtifactHeader(
            kind=kind, method=spec.method, federation=spec.federation, round=1, attempt=1, client=sender, base=_BASE
        )
        layouts = {part: spec.layouts[part] for part in sorted(parts)}
        try:
            packed = pack(header, to_arrays(parts), codec, base)
            codecs = codecs_for(layouts, codec, frozenset() if base is None else frozenset(base.parts))
            decoded = unpack(packed, layouts, codecs=codecs, base=base).parts
        except WireError as error:
            raise DivergedError(f"the {kind} can't be coded: {error}") from error
        return {
            part: {name: tensor.to(parts[part][name].device) for name, tensor in weights.items()}
            for part, weights in to_weights(decoded).items()
        }, len(packed)


def coding_of(spec: FederationSpec) -> WireCoding | None:
    """What the wire does to the numbers of a federation; None where it does nothing."""
    return None if (spec.codec, spec.aggregate_codec) == ("f32", "f32") else WireCoding(spec)
