"""The context of a device's local work: where it trains, progress events, and evaluation of personal models on its images.

Uses torch. Progress events: the start of each phase, its first step, then at most five events a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field

from edge_client.config import AgentConfig
from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData, RoundData
from edge_client.training.own_program import OwnProgram
from fedcg.event_log import EventLog
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Callbacks, Cohort, Evaluation, Machine, Parts, Progress, RoundContext
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.networks.own_backbone import KeptFeatures
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.evaluation import evaluate, is_preferred
from fedcg.values import Value
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import RoundCost

EVERY_S = 0.2


class ProgressEvents:
    """A progress callback for one round attempt.

    Args:
        work: has the event log; its `working` is called at every step, for the supervision of the process.
        attempt: the round attempt.
    """

    def __init__(self, work: Workplace, attempt: RoundAttempt) -> None:
        self._work = work
        self._about = {**vars(attempt), "pid": os.getpid()}
        self._phase = ""
        self._written_at = 0.0

    def __call__(self, phase: str, step: int, steps: int) -> None:
        """Record a finished step."""
        self._work.working()
        now = self._work.clock()
        is_new = phase != self._phase
        if is_new:
            self._phase = phase
            self._work.events.write("phase_started", phase=phase, **self._about)
        if step > 0 and (is_new or step == steps or now - self._written_at >= EVERY_S):
            self._written_at = now
            self._work.events.write("progress", phase=phase, step=step, steps=steps, **self._about)

    def named(self, prefix: str) -> Callable[[str, int, int], None]:
        """The same callback for additional work, e.g. `shadow-classify`."""
        return lambda phase, step, steps: self(f"{prefix}-{phase}", step, steps)


class Workplace(Value):
    """The context of all local work.

    Attributes:
        place: torch device; `threads`: torch threads on the CPU.
        batch_scale: share of the spec's batch that is processed at once. A step still uses the whole batch.
        working: called at every step.
        cost: of the round so far.
        program: this device's own program, if any.
        features: of a frozen backbone, cached between rounds.
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
    program: OwnProgram | None = None
    features: KeptFeatures = field(default_factory=KeptFeatures)

    def context(self, spec: FederationSpec, round_number: int, attempt: int, progress: Progress) -> RoundContext:
        """The context of a round attempt on this device, with its mechanisms and the number of rows that fits its memory."""
        batch = spec.params.get("batch_size")
        most_rows = None
        if isinstance(batch, int) and self.batch_scale < 1.0:
            most_rows = max(2, int(batch * self.batch_scale))
        return RoundContext(
            spec=spec,
            round=round_number,
            attempt=attempt,
            streams=self.streams(spec, round_number, attempt),
            machine=Machine(self.place, most_rows=most_rows),
            callbacks=Callbacks(progress, warn=lambda text: self._warn(round_number, attempt, text)),
            cohort=Cohort(
                None if (secret := self.store.cohort_secret()) is None else Streams(secret).at(spec.federation)
            ),
            privacy=self.config.privacy if spec.classes else self.config.privacy.without_balance(),
        )

    def _warn(self, round_number: int, attempt: int, text: str) -> None:
        self.events.write("method_warning", round=round_number, attempt=attempt, detail=text)

    def seen(self, spec: FederationSpec, data: RoundData) -> tuple[RoundData, ImageSet | None]:
        """A round's data and the common test set, with a frozen backbone's features instead of images if that is exact."""
        common = self.data.common_test(spec)
        sets = [data.train, data.val, data.test, *([] if common is None else [common])]
        train, val, test, *shared = self.features.of(spec, sets, self.place, self.working)
        return RoundData(train, val, test, data.snapshot), next(iter(shared), None)

    def streams(self, spec: FederationSpec, round_number: int, attempt: int) -> Streams:
        """The device's own streams for a round attempt."""
        return Streams(self.store.device_secret()).at(spec.federation, round_number, attempt)


class Measured(Value):
    """Accuracies in [0, 1] of one personal model; None without images to measure on.

    Attributes:
        val: on the validation split. Only this decides between two models, with `val_loss` for ties.
        test: on this device's held-out images.
        common: on the balanced set shared by all clients of a demo.
        by_class: `test` by class, to four digits; None for classes without test images.
    """

    val: float | None = None
    val_loss: float | None = None
    test: float | None = None
    common: float | None = None
    by_class: tuple[float | None, ...] | None = None

    def beats(self, other: Measured | None) -> bool:
        """Whether validation prefers this model. Without validation images, the newer model (this one) is preferred."""
        return other is None or is_preferred(self.val, self.val_loss, other.val, other.val_loss)

    def as_scores(self, prefix: str) -> dict[str, float]:
        """The measured figures by name, for saving with a generation."""
        named = {"val": self.val, "val_loss": self.val_loss, "test": self.test, "common": self.common}
        return {f"{prefix}.{name}": value for name, value in named.items() if value is not None}

    @staticmethod
    def from_scores(scores: Mapping[str, float], prefix: str) -> Measured:
        """The inverse of `as_scores`."""
        val, val_loss, test, common = (scores.get(f"{prefix}.{name}") for name in ("val", "val_loss", "test", "common"))
        return Measured(val, val_loss, test, common)


def measure(spec: FederationSpec, parts: Parts, data: RoundData, common: ImageSet | None, place: str) -> Measured:
    """Evaluate a personal model on validation, test and common images."""
    val, test, shared = (
        evaluate(spec, parts, images, place) if images is not None and len(images) else None
        for images in (data.val, data.test, common)
    )
    return Measured(
        val=None if val is None else val.accuracy,
        val_loss=None if val is None else val.loss,
        test=None if test is None else test.accuracy,
        common=None if shared is None else shared.accuracy,
        by_class=None if test is None else _by_class(test),
    )


def with_downloaded(spec: FederationSpec, parts: Parts, aggregate: Parts) -> Parts | None:
    """A personal model with the downloaded parts; None if the aggregate has none of its parts."""
    own = personal_parts(spec, parts)
    return {part: aggregate.get(part, own[part]) for part in own} if own.keys() & aggregate.keys() else None


def _by_class(test: Evaluation) -> tuple[float | None, ...]:
    counts = zip(test.correct_per_class, test.images_per_class, strict=True)
    return tuple(round(correct / images, 4) if images else None for correct, images in counts)
