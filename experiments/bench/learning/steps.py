"""Milliseconds of one step of each stage, by the plain reference and by ours, on the same networks and threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from experiments.bench.learning.training import Setting, Stage, median_seconds, workers
from fedcg.learning.spec import NetworkChoice

STAGES = (Stage.CLASSIFY, Stage.GAN, Stage.STUDENT)
IMAGES = 2000


@dataclass(frozen=True)
class Steps:
    """What to time.

    Attributes:
        pairs: generator and discriminator by name.
        batches: rows of a step.
        split: extractor and classifier by name.
        steps: of each measurement.
        threads: of either process.
        repeats: of each measurement; the median counts.
    """

    pairs: tuple[tuple[str, str], ...]
    batches: tuple[int, ...]
    split: str
    steps: int
    threads: int
    repeats: int


def measure(plan: Steps, tell: Callable[[str], None]) -> list[dict[str, str | int | float]]:
    """One entry per networks, batch size and stage. The student of either side learns from one teacher.

    Args:
        plan: what to time.
        tell: called with a line of progress before every case.
    """
    cases: list[dict[str, str | int | float]] = []
    with workers(1, plan.threads) as theirs, workers(1, plan.threads) as ours:
        for generator, discriminator in plan.pairs:
            network = NetworkChoice(split=plan.split, generator=generator, discriminator=discriminator)
            for batch in plan.batches:
                plain = Setting(True, network, "separate", batch, IMAGES, plan.steps, 1)  # noqa: FBT003 - `plain`
                for stage in STAGES:
                    tell(f"{generator}/{discriminator}, batch {batch}: {stage.value}")
                    jobs = [
                        partial(theirs.seconds, plain, stage),
                        partial(ours.seconds, replace(plain, plain=False), stage),
                    ]
                    slow, fast = median_seconds(jobs, plan.repeats)
                    cases.append(
                        {
                            "generator": generator,
                            "discriminator": discriminator,
                            "batch": batch,
                            "stage": stage.value,
                            "reference_ms": round(1e3 * slow / plan.steps, 4),
                            "ours_ms": round(1e3 * fast / plan.steps, 4),
                            "speedup": round(slow / fast, 3),
                        }
                    )
    return cases
