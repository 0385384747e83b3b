"""A recorded local round, sent as the update of every device in every round. Torch-free: it runs in the devices' processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edge_client.config import PolicySection
from edge_client.firewall import UpdateFacts, build_update
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.parts import Report


@dataclass(frozen=True)
class Replay:
    """Makes the updates of a federation from the result of one local round.

    Attributes:
        spec: the federation's spec, as its canonical JSON.
        shared: the parts that the local round shared.
        report: of the local round.
    """

    spec: bytes
    shared: PartArrays
    report: Report

    def update(self, device: str, round_number: int, attempt: int, base: Path) -> bytes:
        """The update of a device, through its firewall and the federation's codec.

        Args:
            device: its id.
            round_number: of the round.
            attempt: of the round.
            base: the round's aggregate.
        """
        return build_update(
            self.shared,
            self.report,
            spec=_spec(self.spec),
            policy=PolicySection(),
            facts=UpdateFacts(device, round_number, attempt),
            base=_base(self.spec, base.name, base.read_bytes()),
        )


@lru_cache(maxsize=1)
def _spec(data: bytes) -> FederationSpec:
    return FederationSpec.parse(data)


@lru_cache(maxsize=1)
def _base(spec: bytes, artifact: str, data: bytes) -> Base:
    """The decoded aggregate of the latest round: all devices of a process start from it."""
    parts = {part: _spec(spec).layouts[part] for part in sorted(_spec(spec).upload)}
    return Base(artifact, unpack(data, parts, codecs=codecs_for(parts, _spec(spec).aggregate_codec)).parts)
