"""Milliseconds of one step of each stage, by the plain reference and by ours, on the same networks and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

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


def measure(plan: Steps, announce: Callable[[str], None]) -> list[dict[str, str | int | float]]:
    """One entry per networks, batch size and stage. The student of either side learns from one teacher.

    Args:
        plan: what to time.
        announce: called with a line of progress before every case.
    """
    cases: list[dict[str, str | int | float]] = []
    with workers(1, plan.threads) as theirs, workers(1, plan.threads) as ours:
        for setting, stage, what in cases_of(plan):
            announce(f"{what['generator']}/{what['discriminator']}, batch {setting.batch}: {stage.value}")
            plain = replace(setting, plain=True, passes="separate")
            jobs = [partial(theirs, plain, stage), partial(ours, replace(plain, plain=False), stage)]
            slow, fast = median_seconds(jobs, plan.repeats)
            figures = {
                "reference_ms": round(1e3 * slow / plan.steps, 4),
                "ours_ms": round(1e3 * fast / plan.steps, 4),
                "speedup": round(slow / fast, 3),
            }
            cases.append({**what, **figures})
    return cases


def cases_of(plan: Steps) -> Iterator[tuple[Setting, Stage, dict[str, str | int]]]:
    """Every networks, batch size and stage: how ours trains there, and what to call it in a record."""
    for (generator, discriminator), batch, stage in product(plan.pairs, plan.batches, STAGES):
        network = NetworkChoice(split=plan.split, generator=generator, discriminator=discriminator)
        setting = Setting(False, network, "joint", batch, IMAGES, plan.steps, 1)  # noqa: FBT003 - `plain`
        yield (
            setting,
            stage,
            {"generator": generator, "discriminator": discriminator, "batch": batch, "stage": stage.value},
        )
