"""A figure of an audit: its value with a confidence interval, beside the best trivial guess and the ceiling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from audit.evidence import Knowledge

CONFIDENCE = 0.95
_RESAMPLES = 1000
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def over(self, floor: float) -> Interval:
        """How far it is above a number that has no error of its own."""
        return Interval(self.value - floor, self.low - floor, self.high - floor)


@dataclass(frozen=True)
class Figure:
    """What one attack came to, in one setting.

    Attributes:
        name: as gates use it: `label_l1`, `psnr`, `reid`, `mia_auc` ...
        setting: the attacker's situation in words, unique within a name.
        value: in the figure's unit.
        floor: the same figure of the best trivial guess, which has not seen the update; `floor_is` says which guess that is.
        gain: how much better than the floor the attack is, above 0 where it is better, whichever way the figure points.
        ceiling: the same figure by the device's own extractor, given where it is not sent; None where there is none.
        samples: images, batches or canaries that the interval is over.
        unit: "share", "dB", "nats" or nothing.
    """

    name: str
    title: str
    setting: str
    knowledge: tuple[Knowledge, ...]
    value: Interval
    floor: float
    floor_is: str
    gain: Interval
    samples: int
    ceiling: float | None = None
    unit: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether the attacker has only what a real one can have; else it is a ceiling."""
        return Knowledge.PRIVATE not in self.knowledge

    @property
    def is_of_update(self) -> bool:
        """Whether the attack was on the update itself, and not on the gradient of a batch, which no device sends."""
        return Knowledge.BATCH not in self.knowledge


@dataclass(frozen=True)
class Measure:
    """What the figures of one name measure: its title, and its unit."""

    name: str
    title: str
    unit: str = ""

    def figure(
        self,
        setting: str,
        used: Collection[Knowledge],
        value: Interval,
        floor: tuple[str, float],
        samples: int,
        *,
        gain: Interval | None = None,
        ceiling: float | None = None,
    ) -> Figure:
        """A figure.

        Args:
            setting: the attacker's situation in words.
            used: what the attacker knows, in any order.
            value: what the attack came to.
            floor: the best trivial guess, and what it comes to.
            samples: that the interval is over.
            gain: over the floor; None where the floor has no error: then it is the value's interval less the floor.
            ceiling: what the device's own extractor comes to.
        """
        knowledge, (floor_is, least) = tuple(one for one in Knowledge if one in used), floor
        over = value.over(least) if gain is None else gain
        return Figure(
            self.name, self.title, setting, knowledge, value, least, floor_is, over, samples, ceiling, self.unit
        )

    def paired(
        self,
        setting: str,
        used: Collection[Knowledge],
        values: Values,
        floors: Iterable[tuple[str, Values]],
        seed: int,
        *,
        ceiling: float | None = None,
    ) -> Figure:
        """The mean of values [N] beside that of the best of several trivial guesses, which are compared sample by sample."""
        floor_is, floor = best_of(floors)
        gain = bootstrap(values - floor, seed)
        least = (floor_is, float(floor.mean()))
        return self.figure(setting, used, bootstrap(values, seed), least, len(values), gain=gain, ceiling=ceiling)


def best_of(guesses: Iterable[tuple[str, Values]]) -> tuple[str, Values]:
    """The guess with the highest mean."""
    return max(guesses, key=lambda guess: float(guess[1].mean()))


@dataclass(frozen=True)
class Control:
    """A positive control: the attack on something that is known to leak. Where it fails, low figures of the attack prove nothing.

    Attributes:
        figure: the name of the figures that it is a control of; empty: of all the attack's.
    """

    title: str
    value: float
    must: str
    passed: bool
    figure: str = ""


@dataclass(frozen=True)
class Pictures:
    """Rows of images to look at, each row with a caption; every image a PNG of its own, base64.

    Attributes:
        captions: under the images, row by row; empty or as many as images.
    """

    title: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    captions: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Curve:
    """Lines over one axis, to be drawn.

    Attributes:
        lines: by name, points (x, y).
        log_x: whether the x axis is logarithmic.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]
    log_x: bool = False


@dataclass(frozen=True)
class Outcome:
    """What an attack came to.

    Attributes:
        skipped: why it was not tried; None where it was.
        notes: what a reader has to know to judge the figures, in sentences.
    """

    attack: str
    figures: tuple[Figure, ...] = ()
    controls: tuple[Control, ...] = ()
    pictures: tuple[Pictures, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: str | None = None
    seconds: float = 0.0

    def is_proven(self, figure: str) -> bool:
        """Whether the controls of the figures of this name passed, so that low ones mean that nothing came back."""
        return all(one.passed for one in self.controls if one.figure in ("", figure))


def proportion(successes: int, trials: int) -> Interval:
    """A share with its Clopper-Pearson interval; trials >= 1."""
    bounds = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def bootstrap(
    values: Values, seed: int, statistic: Callable[[Values], float] = lambda some: float(some.mean())
) -> Interval:
    """A statistic of independent values [N, ...], resampled over the first axis (percentiles of 1,000 resamples)."""
    drawn = np.random.default_rng(seed)
    rows = len(values)
    found = [statistic(values[drawn.integers(rows, size=rows)]) for _ in range(_RESAMPLES)]
    return percentile_interval(statistic(values), found)


def percentile_interval(value: float, resampled: Sequence[float]) -> Interval:
    """A value between the percentiles of what resampled values gave."""
    low, high = np.percentile(resampled, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(value, float(low), float(high))
