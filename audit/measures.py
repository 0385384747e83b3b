"""The measures of an audit: figures with confidence interval, best trivial guess and ceiling; similarity of images (PSNR, SSIM).

Images are [N, C, H, W] float32 in [0, 1].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from audit.evidence import Knowledge, View
from fedcg.learning.image_set import ImageSet
from fedcg.values import Value

CONFIDENCE = 0.95
_RESAMPLES = 1000
_FAILED = "failed: "
Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def over(self, floor: float) -> Interval:
        """Return the distance above an exact number."""
        return Interval(self.value - floor, self.low - floor, self.high - floor)


class Chance(NamedTuple):
    """The probability of at least a gain if the update reveals nothing, and the smallest one that the test can give."""

    p: float
    least: float = 0.0


@dataclass(frozen=True)
class Figure:
    """The result of one attack in one setting.

    Attributes:
        name: as in gates: `label_l1`, `psnr`, `reid`, `mia_auc` ...
        setting: the attacker's situation in words, unique within a name.
        value: in the figure's unit.
        floor: the same figure for the best trivial guess, which does not use the update; `floor_is` names that guess.
        gain: improvement over the floor; positive if the attack is better, also for figures where smaller is better.
        ceiling: the same figure with the device's own extractor, where that is not sent; None if there is none.
        samples: number of images, batches or canaries behind the interval.
        unit: "share", "dB", "nats" or empty.
        p: probability of at least this gain if the update reveals nothing, of this setting alone; None if unknown.
        least_p: the smallest `p` that the test can give with this number of images and classes.
        rows: number of images in the gradient, if the attack used one.
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
    p: float | None = None
    least_p: float = 0.0
    rows: int = 1

    @property
    def is_possible(self) -> bool:
        """Whether a real attacker can have this knowledge; else the figure is a ceiling."""
        return Knowledge.PRIVATE not in self.knowledge

    @property
    def is_of_update(self) -> bool:
        """Whether the attack used the update itself, and not the gradient of a batch, which no device sends."""
        return Knowledge.BATCH not in self.knowledge


class Measure(Value):
    """The title and unit of the figures of one name."""

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
        chance: Chance | None = None,
    ) -> Figure:
        """Return a figure.

        Args:
            setting: the attacker's situation in words.
            used: the attacker's knowledge, in any order.
            value: the attack's result.
            floor: the best trivial guess and its result.
            samples: number of samples behind the interval.
            gain: over the floor; None if the floor is exact: then it is the value's interval minus the floor.
            ceiling: the result with the device's own extractor.
            chance: of at least this gain if the update reveals nothing; None if unknown, as if it is not a number.
        """
        knowledge, (floor_is, least) = tuple(one for one in Knowledge if one in used), floor
        over = value.over(least) if gain is None else gain
        tested = () if chance is None or np.isnan(chance.p) else chance
        given = value, least, floor_is, over, samples, ceiling, self.unit
        return Figure(self.name, self.title, setting, knowledge, *given, *tested)

    def paired(
        self,
        setting: str,
        used: Collection[Knowledge],
        values: Values,
        floors: Iterable[tuple[str, Values]],
        seed: int,
        *,
        ceiling: float | None = None,
        chance: Chance | None = None,
    ) -> Figure:
        """Return the mean of values [N] with the best of several trivial guesses as the floor, paired by sample; chance: default of a sign test."""
        floor_is, floor = best_of(floors)
        gain, tested = bootstrap(values - floor, seed), chance or sign_test(values - floor)
        value, least = bootstrap(values, seed), (floor_is, float(floor.mean()))
        return self.figure(setting, used, value, least, len(values), gain=gain, ceiling=ceiling, chance=tested)


def best_of(guesses: Iterable[tuple[str, Values]]) -> tuple[str, Values]:
    """Return the guess with the highest mean."""
    return max(guesses, key=lambda guess: float(guess[1].mean()))


@dataclass(frozen=True)
class Control:
    """A positive control: the attack on a case that is known to leak. If it fails, low figures of the attack prove nothing.

    Attributes:
        figure: the name of the figures that it checks; empty: all figures of the attack.
    """

    title: str
    value: float
    must: str
    passed: bool
    figure: str = ""


@dataclass(frozen=True)
class Pictures:
    """Rows of images for a person, each row with a caption; every image is a separate PNG, base64.

    Attributes:
        captions: under the images, row by row; empty or one for each image.
    """

    title: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    captions: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attack.

    Attributes:
        skipped: why it was not tried; None if it was.
        notes: sentences that a reader needs to judge the figures.
    """

    attack: str
    figures: tuple[Figure, ...] = ()
    controls: tuple[Control, ...] = ()
    pictures: tuple[Pictures, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: str | None = None
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def failure(cls, attack: str, error: BaseException) -> Outcome:
        """Return the outcome of an attack that ended with an error; a gate on its figures does not pass."""
        return cls(attack, skipped=f"{_FAILED}{type(error).__name__}: {error}")

    @property
    def has_failed(self) -> bool:
        """Whether the attack ended with an error."""
        return (self.skipped or "").startswith(_FAILED)

    def is_proven(self, figure: str) -> bool:
        """Whether the controls for figures of this name passed, so that low figures are evidence."""
        return all(one.passed for one in self.controls if one.figure in ("", figure))


def proportion(successes: int, trials: int) -> Interval:
    """Return a share with its Clopper-Pearson interval; trials >= 1."""
    bounds = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def bootstrap(values: Values, seed: int, statistic: Callable[[Values], float] = np.mean) -> Interval:
    """Return a statistic of independent values [N, ...], resampled over the first axis (percentiles of 1,000 resamples)."""
    drawn, rows = np.random.default_rng(seed), len(values)
    found = [statistic(values[drawn.integers(rows, size=rows)]) for _ in range(_RESAMPLES)]
    return percentile_interval(float(statistic(values)), found)


def sign_test(gains: Values) -> Chance:
    """Return the probability of at least as many positive gains [N] if each is positive with a probability of at most 1/2."""
    likely = binomtest(int((gains > 0).sum()), len(gains), alternative="greater").pvalue
    return Chance(float(likely), 2.0 ** -len(gains))


def percentile_interval(value: float, resampled: Sequence[float]) -> Interval:
    """Return a value with the percentiles of its resampled values as bounds."""
    low, high = np.percentile(resampled, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(value, float(low), float(high))


_REASSIGNED = 20_000  # so that a probability can be below 1 % after the correction for 200 tests
_AT_ONCE = 1 << 22
_TIE = 1e-9


def reassigned(labels: NDArray[np.int64], members: Flags, seed: int, weight: int = 0) -> Iterator[Flags]:
    """Yield 20,000 assignments of "trained on", [some, N]: each member and one other image of its class are swapped by a coin toss.

    Args:
        labels: [N], with as many members as others of each class.
        members: [N].
        seed: of the coin.
        weight: numbers that the caller computes for each assignment; limits the rows of a block. Default: N.
    """
    drawn, found = np.random.default_rng(seed), [np.flatnonzero(side) for side in (members, ~members)]
    inside, outside = (rows[np.argsort(labels[rows], kind="stable")] for rows in found)
    count = max(1, _AT_ONCE // (weight or len(labels)))
    for first in range(0, _REASSIGNED, count):
        swapped = drawn.random((min(count, _REASSIGNED - first), len(inside))) < 0.5
        flags = np.empty((len(swapped), len(labels)), dtype=bool)
        flags[:, inside], flags[:, outside] = ~swapped, swapped
        yield flags


def least_of_swaps(pairs: int) -> float:
    """Return the smallest probability that `reassigned` can give: it has 2^pairs different assignments."""
    return max(1 / (1 + _REASSIGNED), 2.0**-pairs)


def chance(statistic: Callable[[Flags], Values], labels: NDArray[np.int64], members: Flags, seed: int) -> Chance:
    """Return the probability of at least this statistic ([some, N] -> [some]) if "trained on" is assigned at random (`reassigned`)."""
    null = np.concatenate([statistic(some) for some in reassigned(labels, members, seed)])
    return Chance(chance_in(float(statistic(members[None])[0]), null), least_of_swaps(int(members.sum())))


def chance_in(value: float, null: Values) -> float:
    """Return the probability of at least this value, from values that were drawn without a leak (plus one, Phipson and Smyth 2010); NaN of NaN."""
    return value if np.isnan(value) else (1 + int((null >= value - _TIE).sum())) / (1 + len(null))


_SSIM_WINDOW = 7  # Anti-GAN §5.1 has windows of 8x8, all pixels weighted alike; the library's are odd
_SHOWN_SIDE = 64


def psnr(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """Return the PSNR in dB of every image, [N] (FedCG §4.2); guesses are clamped to [0, 1]."""
    return np.array([peak_signal_noise_ratio(right, guess, data_range=1.0) for guess, right in _pairs(guesses, truth)])


def ssim(guesses: torch.Tensor, truth: torch.Tensor) -> Values:
    """Return the SSIM of every image, [N], uniform windows (Anti-GAN §5.1); guesses are clamped to [0, 1]."""
    found = [
        structural_similarity(right, guess, win_size=_SSIM_WINDOW, channel_axis=0, data_range=1.0)
        for guess, right in _pairs(guesses, truth)
    ]
    return np.array(found)


def _pairs(guesses: torch.Tensor, truth: torch.Tensor) -> Iterator[tuple[Values, Values]]:
    return zip(guesses.detach().clamp(0, 1).double().numpy(), truth.double().numpy(), strict=True)


def unit_pixels(images: torch.Tensor) -> torch.Tensor:
    """Convert uint8 to float32 in [0, 1]; return float32 tensors unchanged."""
    return images.float() / 255.0 if images.dtype == torch.uint8 else images


def png(image: torch.Tensor) -> str:
    """Return one image [C, H, W] in [0, 1] as a base64 PNG, enlarged without smoothing so that its pixels are visible."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.ascontiguousarray(pixels.squeeze()))
    scale, stream = max(1, _SHOWN_SIDE // max(picture.size)), io.BytesIO()
    larger = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    larger.save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


Likeness = Callable[[torch.Tensor, torch.Tensor], Values]
NEAREST = "the nearest auxiliary image of its class"
"""Not a guess, since choosing it takes the right image. It shows the score of an image that looks somewhat alike."""
MEASURES: Mapping[str, tuple[Likeness, Measure]] = {
    "psnr": (psnr, Measure("psnr", "Reconstruction, PSNR", "dB")),
    "ssim": (ssim, Measure("ssim", "Reconstruction, SSIM")),
}


class Reconstructions(Value):
    """Guesses and the images that they are compared with, in the same order, both [N, C, H, W] in [0, 1].

    Attributes:
        floors: trivial guesses by name, each with the images that it is compared with.
    """

    guesses: torch.Tensor
    truth: torch.Tensor
    floors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def mean(self, name: str) -> float:
        """Return the mean PSNR or SSIM of the guesses."""
        return float(MEASURES[name][0](self.guesses, self.truth).mean())

    def best_floor(self, name: str) -> tuple[str, Values]:
        """Return the trivial guess with the highest mean and its values, image by image; `NEAREST` does not count."""
        likeness, _ = MEASURES[name]
        return best_of((floor, likeness(*pair)) for floor, pair in self.floors.items() if floor != NEAREST)

    def figure(self, name: str, setting: str, used: Collection[Knowledge], ceiling: float | None, seed: int) -> Figure:
        """Return PSNR or SSIM with its gain over the best floor, paired by image."""
        likeness, measure = MEASURES[name]
        values = likeness(self.guesses, self.truth)
        return measure.paired(setting, used, values, [self.best_floor(name)], seed, ceiling=ceiling)


def trivial_images(view: View, truth: ImageSet, stream: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield guesses without an update, [N, C, H, W] in [0, 1], then `NEAREST`; the first three need no label.

    Args:
        view: for the form of images and the auxiliary images; without those only the first two guesses are yielded.
        truth: the images to guess.
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
    """Return the row of [N, C, H, W] with the smallest squared distance to an image [C, H, W]."""
    return int((others - image).square().flatten(1).sum(1).argmin())
