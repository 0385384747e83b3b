"""Where a device trains, and how it says how far it is: the context of local rounds, and their progress as events.

Progress is the start of each phase, its first step, then at most five lines a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_client.config import AgentConfig
from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData, RoundData
from fedcg.event_log import EventLog
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Callbacks, Machine, Masking, Progress, RoundContext
from fedcg.learning.networks.own_backbone import KeptFeatures
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import RoundCost

EVERY_S = 0.2


class ProgressEvents:
    """A progress callback for one round attempt.

    Args:
        events: where the lines go.
        attempt: the round attempt.
        pid: of the process that trains.
        clock: monotonic seconds.
        working: called at every step, for the supervision of the process.
    """

    def __init__(
        self,
        events: EventLog,
        attempt: RoundAttempt,
        pid: int,
        clock: Callable[[], float],
        working: Callable[[], None] = lambda: None,
    ) -> None:
        self._events = events
        self._about = {"round": attempt.round, "attempt": attempt.attempt, "pid": pid}
        self._clock = clock
        self._working = working
        self._phase = ""
        self._written_at = 0.0

    def __call__(self, phase: str, step: int, steps: int) -> None:
        """Record a step that is done."""
        self._working()
        now = self._clock()
        is_new = phase != self._phase
        if is_new:
            self._phase = phase
            self._events.write("phase_started", phase=phase, **self._about)
        if step > 0 and (is_new or step == steps or now - self._written_at >= EVERY_S):
            self._written_at = now
            self._events.write("progress", phase=phase, step=step, steps=steps, **self._about)

    def named(self, prefix: str) -> Callable[[str, int, int], None]:
        """The same callback for work beside the round itself, e.g. `shadow-classify`."""
        return lambda phase, step, steps: self(f"{prefix}-{phase}", step, steps)


@dataclass(frozen=True)
class Workplace:
    """The context of all local work.

    Attributes:
        place: torch device; `threads` of torch on the CPU.
        batch_scale: share of the spec's batch that goes through the networks at once; the step is that of the whole batch.
        working: called at every step.
        cost: of the round so far.
        features: of a frozen backbone, kept from round to round.
    """

    config: AgentConfig
    store: PrivateStore
    data: LocalData
    events: EventLog
    place: str = "cpu"
    threads: int = 1
    batch_scale: float = 1.0
    clock: Callable[[], float] = time.monotonic
    working: Callable[[], None] = lambda: None
    cost: Callable[[], RoundCost | None] = lambda: None
    features: KeptFeatures = field(default_factory=KeptFeatures)

    def context(self, spec: FederationSpec, round_number: int, attempt: int, progress: Progress) -> RoundContext:
        """The context of a round attempt on this device, with its mechanisms and as many rows at once as fit its memory."""
        batch = spec.params.get("batch_size")
        most_rows = None
        if isinstance(batch, int) and self.batch_scale < 1.0:
            most_rows = max(2, int(batch * self.batch_scale))
        return RoundContext(
            spec=spec,
            round=round_number,
            attempt=attempt,
            streams=self.streams(spec, round_number, attempt),
            machine=Machine(self.place, self.config.training.precision, most_rows=most_rows),
            callbacks=Callbacks(progress, warn=lambda text: self._warn(round_number, attempt, text)),
            masking=Masking(
                None if (secret := self.store.cohort_secret()) is None else Streams(secret).at(spec.federation)
            ),
            privacy=self.config.privacy,
        )

    def _warn(self, round_number: int, attempt: int, text: str) -> None:
        self.events.write("method_warning", round=round_number, attempt=attempt, detail=text)

    def seen(self, spec: FederationSpec, data: RoundData) -> tuple[RoundData, ImageSet | None]:
        """A round's data and the common test set, a frozen backbone's features in the place of images where that is exact."""
        common = self.data.common_test(spec)
        sets = [data.train, data.val, data.test, *([] if common is None else [common])]
        train, val, test, *shared = self.features.of(spec, sets, self.place, self.working)
        return RoundData(train, val, test, data.snapshot), next(iter(shared), None)

    def streams(self, spec: FederationSpec, round_number: int, attempt: int) -> Streams:
        """The device's own streams for a round attempt."""
        return Streams(self.store.device_secret()).at(spec.federation, round_number, attempt)
