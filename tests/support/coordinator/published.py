"""A publisher of the coordinator that only records, and a receiver that uses it."""

import threading
from collections.abc import Callable
from typing import Any, cast

from coordinator.messaging.publisher import Publisher
from coordinator.updates.receiver import Receiver
from coordinator.updates.update_checks import UpdateChecks
from fedcg.wire.errors import Refusals
from fedcg.wire.messages.schemas import Carrier, Manifest, Outcome, RoundAttempt
from fedcg.wire.transfer.windows import Ranges
from tests.support.coordinator.world import World


class Published:
    """Records sent grants and receipts."""

    def __init__(self) -> None:
        self.used_carrier = Carrier.MQTT
        self.held = threading.Event()  # a receipt waits
        self.release = threading.Event()
        self.release.set()  # clear it, and the next receipt waits
        self.needs: list[Ranges] = []
        self.receipts: list[tuple[str, Outcome]] = []

    def carrier(self, device: str) -> Carrier:
        return self.used_carrier

    def need(self, device: str, manifest: Manifest, ranges: Ranges) -> None:
        self.needs.append(ranges)

    def receipt(self, device: str, at: RoundAttempt, artifact: str, outcome: Outcome, reason: str) -> None:
        self.held.set()
        self.release.wait(30)
        self.receipts.append((artifact, outcome))


def receiver_of(world: World, published: Published, notify: Callable[[Any], None]) -> Receiver:
    """Return the receiver of a world, not started."""
    context = world.service_context()
    return Receiver(
        UpdateChecks(context.spec, context.store, context.artifacts, context.clock),
        context.artifacts.root / ".partial",
        context.limits,
        cast(Publisher, published),
        context.events,
        Refusals(context.events),
        notify,
    )
