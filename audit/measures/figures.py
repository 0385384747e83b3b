"""A figure of an audit: its value with a confidence interval, beside the best trivial guess and the ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from audit.evidence.case import Knowledge

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float


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
