"""The measures of an audit: a figure with its confidence interval beside the best trivial guess and the ceiling, and how alike images are (PSNR, SSIM).

Images are [N, C, H, W] float32 in [0, 1].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from audit.evidence import Knowledge, View
from fedcg.learning.image_set import ImageSet

CONFIDENCE = 0.95
_RESAMPLES = 1000
_FAILED = "failed: "
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
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def failure(cls, attack: str, error: BaseException) -> Outcome:
        """Of an attack that ended with an error: it has shown nothing, so a gate on its figures does not pass."""
        return cls(attack, skipped=f"{_FAILED}{type(error).__name__}: {error}")

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return (self.skipped or "").startswith(_FAILED)

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


_SSIM_WINDOW = 7  # Anti-GAN §5.1 has windows of 8x8, all pixels weighted alike; the library's are odd
_SHOWN_SIDE = 64


def psnr(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """PSNR in dB of every image, [N] (FedCG §4.2); guesses are clamped to [0, 1]."""
    return np.array([peak_signal_noise_ratio(right, guess, data_range=1.0) for guess, right in _pairs(guesses, truth)])


def ssim(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """SSIM of every image, [N], uniform windows (Anti-GAN §5.1); guesses are clamped to [0, 1]."""
    found = [
        structural_similarity(right, guess, win_size=_SSIM_WINDOW, channel_axis=0, data_range=1.0)
        for guess, right in _pairs(guesses, truth)
    ]
    return np.array(found)


def _pairs(guesses: torch.Tensor, truth: torch.Tensor) -> Iterator[tuple[Values, Values]]:
    return zip(guesses.detach().clamp(0, 1).double().numpy(), truth.double().numpy(), strict=True)


def unit_pixels(images: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32 in [0, 1]; tensors of float32 as they are."""
    return images.float() / 255.0 if images.dtype == torch.uint8 else images


def png(image: torch.Tensor) -> str:
    """One image [C, H, W] in [0, 1] as a base64 PNG, enlarged without smoothing so that a person sees its pixels."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.ascontiguousarray(pixels.squeeze()))
    scale = max(1, _SHOWN_SIDE // max(picture.size))
    stream = io.BytesIO()
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(
        stream, "PNG", optimize=True
    )
    return base64.b64encode(stream.getvalue()).decode()


Likeness = Callable[[torch.Tensor, torch.Tensor], Values]
NEAREST = "the nearest auxiliary image of its class"
"""Not a guess: only somebody who has the right image can choose it. What an image that looks a little alike scores."""
MEASURES: Mapping[str, tuple[Likeness, Measure]] = {
    "psnr": (psnr, Measure("psnr", "Reconstruction, PSNR", "dB")),
    "ssim": (ssim, Measure("ssim", "Reconstruction, SSIM")),
}


@dataclass(frozen=True)
class Reconstructions:
    """Guesses and the images that they are compared with, in one order, both [N, C, H, W] in [0, 1].

    Attributes:
        floors: trivial guesses by name, each with the images that it is compared with.
    """

    guesses: torch.Tensor
    truth: torch.Tensor
    floors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def mean(self, name: str) -> float:
        """Mean PSNR or SSIM of the guesses."""
        return float(MEASURES[name][0](self.guesses, self.truth).mean())

    def best_floor(self, name: str) -> tuple[str, Values]:
        """The trivial guess of the highest mean, and its values, image by image; `NEAREST` is none."""
        likeness, _ = MEASURES[name]
        return best_of((floor, likeness(*pair)) for floor, pair in self.floors.items() if floor != NEAREST)

    def figure(self, name: str, setting: str, used: Collection[Knowledge], ceiling: float | None, seed: int) -> Figure:
        """PSNR or SSIM with its gain over the best floor, paired image by image."""
        likeness, measure = MEASURES[name]
        values = likeness(self.guesses, self.truth)
        return measure.paired(setting, used, values, [self.best_floor(name)], seed, ceiling=ceiling)


def trivial_images(view: View, truth: ImageSet, stream: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Guesses of one who has seen no update, [N, C, H, W] in [0, 1], and `NEAREST` beside them: the first three take no label.

    Args:
        view: for the form of images, and the auxiliary ones; without them there are the first two guesses alone.
        truth: the images that are guessed.
        stream: for the noise.
    """
    form = view.spec.image.tensor_shape
    yield "clamped noise", torch.randn((len(truth), *form), generator=stream).clamp(0, 1)
    yield "grey", torch.full((len(truth), *form), 0.5)
    if view.auxiliary is None:
        return
    pixels = unit_pixels(view.auxiliary.images)
    yield "the mean of the auxiliary images", pixels.mean(0).expand(len(truth), *form)
    means, nearest = [], []
    for image, label in zip(unit_pixels(truth.images), truth.labels, strict=True):
        same = pixels[view.auxiliary.labels == label] if (view.auxiliary.labels == label).any() else pixels
        means.append(same.mean(0))
        nearest.append(same[nearest_row(image, same)])
    yield "the mean auxiliary image of its class", torch.stack(means)
    yield NEAREST, torch.stack(nearest)


def nearest_row(image: torch.Tensor, others: torch.Tensor) -> int:
    """The row of [N, C, H, W] with the smallest squared distance to an image [C, H, W]."""
    return int((others - image).square().flatten(1).sum(1).argmin())
