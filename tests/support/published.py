"""A publisher of the coordinator that only remembers."""

from __future__ import annotations

from fedcg.wire.messages.messages import Carrier, Manifest, Outcome
from fedcg.wire.transfer.chunk_window import Ranges


class Published:
    """What grants and receipts were sent."""

    def __init__(self) -> None:
        self.needs: list[Ranges] = []
        self.receipts: list[tuple[str, Outcome]] = []

    def carrier(self, device: str) -> Carrier:
        return Carrier.MQTT

    def need(self, device: str, manifest: Manifest, ranges: Ranges) -> None:
        self.needs.append(ranges)

    def receipt(self, device: str, manifest: Manifest, outcome: Outcome, reason: str) -> None:
        self.receipts.append((manifest.artifact.id, outcome))
