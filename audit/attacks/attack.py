"""The contract of an attack: one value that says what it does, what it needs, and carries it out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from audit.evidence.case import Case
from audit.measures.figures import Outcome


class Effort(str, Enum):
    """How much time an attack may take.

    `QUICK` is what a device runs before it publishes: all attacks together 60 s for LeNet5 on 2 CPUs; `DEFAULT`: 10 minutes;
    `THOROUGH`: for publications.
    """

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"

    def of(self, quick: int, default: int, thorough: int) -> int:
        """The number that goes with this effort; 0 leaves something out."""
        return {Effort.QUICK: quick, Effort.DEFAULT: default, Effort.THOROUGH: thorough}[self]


Progress = Callable[[int, int], None]
"""(steps done, steps in all); an attack calls it at least every few seconds."""


def counter(progress: Progress, total: int) -> Callable[[], None]:
    """A function to call after each of `total` steps."""
    steps = itertools.count(1)
    return lambda: progress(next(steps), total)


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes:
        name: on the command line and in gates.
        title: for a report; `question` is what a privacy officer asks, in one sentence; `source` paper and equations.
        lacks: why it can't be tried on a case, as a sentence with the remedy; None where it can.
        run: carries it out; random numbers come from `case.streams.at(name)` alone; raises nothing for a failed guess.
    """

    name: str
    title: str
    question: str
    source: str
    lacks: Callable[[Case], str | None]
    run: Callable[[Case, Effort, Progress], Outcome]
