"""What `fedcg bench coordinator` works out: times of each round by the database, memory over rounds, the cost of watchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from coordinator.storage.store import Store
from experiments.bench.coordinator.rounds import Run, Setting
from experiments.bench.transport.broker import FEDERATION

WARM = 2
"""Rounds after which memory is compared: allocators and caches have filled."""
POINTS = 8
"""Rounds that a slope needs: in fewer, one allocation looks like growth."""


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        watchers: event streams that were open all the time; None where they came or went.
        seconds: from the opened attempt to its aggregate.
        next_offer_s: from the last stored update to the next offer; None for the last round.
        processor_s: processor time of the coordinator's process, without its worker, until the next offer.
        memory_mb: resident memory of the process and of its children, the worker, in 10^6 bytes, after the round.
    """

    round: int
    watchers: int | None
    seconds: float
    next_offer_s: float | None
    processor_s: float
    memory_mb: tuple[float, float]


def rounds_of(store: Store, run: Run, setting: Setting) -> list[Round]:
    """The rounds of a run, by the coordinator's database and the samples."""
    attempts, found = store.attempts(FEDERATION), []
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        number = attempt.round
        changes = setting.watchers > 0 and setting.begins_turn(number)
        last = max(update.stored_at for update in store.updates(FEDERATION, attempt.at))
        until = run.closed[number] if following is None else run.opened[following.round]
        found.append(
            Round(
                round=number,
                watchers=None if changes else setting.watchers_in(number),
                seconds=round((attempt.closed_at or 0.0) - attempt.opened_at, 3),
                next_offer_s=None if following is None else round(following.opened_at - last, 3),
                processor_s=round(until.processor_s - run.opened[number].processor_s, 2),
                memory_mb=run.closed[number].memory_mb,
            )
        )
    return found


def growth_mb(rounds: Sequence[Round]) -> float | None:
    """Resident memory per round, in 10^6 bytes: the slope of a straight line after `WARM` rounds; None for fewer than `POINTS` rounds."""
    later = rounds[WARM:]
    if len(later) < POINTS:
        return None
    return round(linear_regression([each.round for each in later], [sum(each.memory_mb) for each in later]).slope, 3)


def cost_of_watchers(rounds: Sequence[Round], turn: int) -> dict[str, dict[str, Any]]:
    """With watchers over without: for each figure the median of each turn's rounds, and the ratio of neighbouring turns.

    Rounds in which watchers came or went are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ("seconds", "next_offer_s", "processor_s"):
        turns: list[float] = []
        for start in range(0, len(rounds), turn):
            values = [getattr(each, name) for each in rounds[start : start + turn] if each.watchers is not None]
            turns.append(median(value for value in values if value is not None))
        ratios = [round(watched / alone, 3) for alone, watched in zip(turns[0::2], turns[1::2], strict=True)]
        found[name] = {"without": turns[0::2], "with": turns[1::2], "ratios": ratios, "ratio": round(median(ratios), 3)}
    return found


def draw_memory(rounds: Sequence[Round], path: Path, title: str) -> None:
    """Draw resident memory over rounds, of the coordinator's process and of its worker, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    numbers = [each.round for each in rounds]
    for index, label in enumerate(("coordinator", "its aggregation worker")):
        panel.plot(numbers, [each.memory_mb[index] for each in rounds], marker=".", label=label)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("round")
    panel.set_ylabel("resident memory, MB")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
