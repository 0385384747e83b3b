"""Tests whether the sent generator has memorised training images, by its samples' distance to them and by images decoded from its samples.

Both compare training images with equally many other images of the same classes, so that effects common to a class
cancel out. FedCG §3.4 claims that a generator shows a distribution and no single image. No measurement of this claim is
published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import nn

from audit import measures
from audit.attacks.attack import Attack, Effort, Found, Tick, Trial
from audit.attacks.membership import auc, auc_gain, aucs, chance_of_gain, sides
from audit.evidence import Case, Extractor, Knowledge, View, joined, networks
from audit.measures import Chance, Control, Figure, Interval, Likeness, Measure, Pictures, Values, unit_pixels
from audit.techniques import gradients
from audit.techniques.image_decoder import Decoder, trained_decoder
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import extract_features, generate
from fedcg.values import Value
from fedcg.wire.parts import Part

_MOST_NUMBERS = 1 << 24  # numbers in the samples of one class: 64 MB
_PLANTED_NOISE = 0.01
_MEMORISED, _REPEATED = 10, 0.05  # the control of memory_worst: images, and their share of the samples of their classes
_SURE, _COIN = 0.01, 0.5
_NEAR = 1e-6
_LEAST_SPREAD = (
    0.1  # else the noise of a copy in a constant map hides that it is one; chosen on other seeds than the tests'
)
_LEAST_KNOWN = 4  # auxiliary images of a class
_TAIL = 8  # least number of held-out images that show the tail's shape
_DECODED = "similarity of decoded samples to the nearest training image"
_MEMORY = Measure("memory_auc", "training images distinguished from others by distance to the generator's samples")
_WORST = Measure(
    "memory_worst", "the training image nearest to a sample, in deviations of images that were not trained on"
)
_INVERTED: Sequence[tuple[Likeness, Measure]] = (
    (measures.psnr, Measure("inverter_psnr", _DECODED, "dB")),
    (measures.ssim, Measure("inverter_ssim", _DECODED)),
)

Samples = Callable[[int, int], torch.Tensor]
"""(class, count) -> features from a generator, [n, F]."""


def samples_of(view: View, generator: Weights, streams: Streams) -> Samples:
    """Return G(z, y) of a generator; the noise of a class is the same for every generator."""
    network = load_part(view.spec, Part.GENERATOR, generator)

    def draw(label: int, count: int) -> torch.Tensor:
        noise = torch.randn(count, view.spec.network.noise_dim, generator=streams.generator("noise", label))
        return generate(network, noise, torch.full((count,), label)).flatten(1)

    return draw


def planted(features: torch.Tensor, labels: torch.Tensor, streams: Streams) -> Samples:
    """Return a generator that has memorised: it repeats the features of training images, with noise of 1 % of their deviation."""

    def draw(label: int, count: int) -> torch.Tensor:
        mine = features[labels == label]
        noise = torch.randn(count, features.shape[1], generator=streams.generator("planted", label))
        return mine[torch.arange(count) % len(mine)] + _PLANTED_NOISE * features.std() * noise

    return draw


def likeness(measure: Likeness, pictures: torch.Tensor, images: torch.Tensor) -> Values:
    """Return a measure of every pair, [pictures, images]."""
    pairs = measure(pictures.repeat_interleave(len(images), 0), images.repeat(len(pictures), 1, 1, 1))
    return pairs.reshape(len(pictures), len(images))


def nearest_gain(tables: Sequence[Values], seed: int) -> tuple[Interval, float, Interval, Chance]:
    """Compare each picture's nearest training image with its nearest held-out image.

    Pictures of a class share their nearest image, so they are not independent samples. The gain's interval and its
    probability therefore come from random assignments of images to "trained on": the distribution of the figure if
    nothing was memorised.

    Args:
        tables: by class, similarity [pictures, 2 n]: n training images, then n held out.
        seed: for the random assignments.

    Returns:
        Similarity to the nearest training image, to the nearest held-out one, the gain, and the probability of at least
        this gain by chance.
    """
    by_class = [table.reshape(len(table), 2, -1) for table in tables]
    nearest = np.concatenate([table.max(axis=2) for table in by_class])
    by_chance = np.sum([_swapped(table, seed + at) for at, table in enumerate(by_class)], axis=0) / len(nearest)
    train, held_out = nearest.mean(axis=0)
    gain, spread = float(train - held_out), measures.percentile_interval(0.0, by_chance.tolist())
    return (
        measures.bootstrap(nearest[:, 0], seed),
        float(held_out),
        Interval(gain, gain - spread.high, gain - spread.low),
        Chance(measures.chance_in(gain, by_chance), measures.least_of_swaps(sum(len(one[0, 0]) for one in by_class))),
    )


def _swapped(table: Values, seed: int) -> Values:
    """Return the summed gain of the pictures of a class [pictures, 2, n] for each random assignment of "trained on"."""
    count, flags = table.shape[2], np.repeat([True, False], table.shape[2])
    found = []
    for some in measures.reassigned(np.tile(np.arange(count), 2), flags, seed, table.size):
        stays = some[:, None, :count]
        train, held_out = (np.where(one, table[:, 0], table[:, 1]).max(2) for one in (stays, ~stays))
        found.append((train - held_out).sum(1))
    return np.concatenate(found)


def exposure(features: torch.Tensor, labels: torch.Tensor, samples: Samples, count: int) -> Values:
    """Return how much nearer a sample of its class is to each image [N, D] than to the class's images on average: the largest log ratio over samples, [N].

    A sample that repeats the features of one image is near to it alone; a sample near the centre of its class is near to all.
    """
    found, count = torch.zeros(len(labels)), max(2, min(count, _MOST_NUMBERS // features.shape[1]))
    for label in labels.unique().tolist():
        mine = labels == label
        distances = torch.cdist(features[mine], samples(label, count)).clamp(min=_NEAR)
        found[mine] = (distances.mean(0) / distances).log().amax(1)
    return found.double().numpy()


def standardised_by_class(scores: Values, labels: NDArray[Any], known: Values, known_labels: NDArray[Any]) -> Values:
    """Return scores [N] in mean deviations from the median of other images of their class [M]; from that of all, if the class has fewer than 4.

    Classes differ in how near their images are to samples. The other images are neither trained on nor held out, so
    that both remain alike if nothing leaks.
    """
    found = np.empty(len(scores))
    for label in np.unique(labels):
        same = known[known_labels == label]
        same = same if len(same) >= _LEAST_KNOWN else known
        centre = np.median(same)
        found[labels == label] = (scores[labels == label] - centre) / max(float(np.abs(same - centre).mean()), _NEAR)
    return found


def worst_figure(setting: str, used: Collection[Knowledge], scores: Values, count: int) -> Figure:
    """Return the figure of the most exposed training image, in deviations of images that were not trained on.

    The probability is that of the largest of as many draws from the held-out images' distribution. Exposure is a maximum
    of log ratios, so its upper tail is taken as exponential. Let k of m held-out scores exceed the next one, u, by S in
    total. For such a tail a new score exceeds x > u with probability (k + 1) / (m + 1) (1 + (x - u) / S)^-k exactly. With
    fewer than 16 held-out images there is no probability. Assigning "trained on" at random can't show few memorised
    images: if ten of 300 among 400 images were, all ten are called "trained on" in 6 % of the assignments.

    Args:
        setting: in words.
        used: the attacker's knowledge.
        scores: of `exposure`, [N]; the first `count` are training images.
        count: number of training images.
    """
    others = scores[count:]
    train, others = np.split((scores - others.mean()) / max(float(others.std(ddof=1)), _NEAR), [count])
    passed, value = min(max(_TAIL, len(others) // 5), len(others) - 1), float(train.max())
    start, *tail = np.sort(others)[-passed - 1 :].tolist()
    excess, share = max(sum(tail) - passed * start, _NEAR), (passed + 1) / (len(others) + 1)

    def largest(quantile: float) -> float:
        one = -np.expm1(np.log(quantile) / count)
        return float(start + excess * ((one / share) ** (-1 / passed) - 1))

    beyond = share * max(1 + (value - start) / excess, share ** (1 / passed)) ** -passed
    middle, low, high = map(largest, (0.5, 0.975, 0.025))
    return _WORST.figure(
        setting,
        used,
        Interval(value, value, value),
        ("the nearest of as many images that were not trained on, predicted from those held out", middle),
        count,
        gain=Interval(value - middle, value - low, value - high),
        chance=Chance(float(binom.sf(0, count, beyond))) if len(others) >= 2 * _TAIL else None,
    )


class _Plan(Value):
    """The amount of work: `samples` of the generator per class, steps of the `decoder`, decoded `pictures` and matched `images` per class."""

    samples: int
    decoder: int
    pictures: int
    images: int
    surrogate_epochs: int


_PLANS = {
    Effort.QUICK: _Plan(300, 200, 4, 20, 5),
    Effort.DEFAULT: _Plan(2000, 1500, 10, 50, 20),
    Effort.THOROUGH: _Plan(10_000, 5000, 40, 200, 40),
}


class _Setting(Value):
    """One extractor's view of the device's images.

    Attributes:
        images: equally many training and held-out images of each class; `features` of both, in this order, [2 n, F].
        everyone: all images, training images first; `every_feature` of them, [N, F]; `trained`: number of the former.
        known: features and labels of the auxiliary images.
    """

    source: Extractor
    spec: FederationSpec
    images: ImageSet
    features: torch.Tensor
    everyone: ImageSet
    every_feature: torch.Tensor
    trained: int
    known: tuple[torch.Tensor, torch.Tensor] | None
    decoder: Decoder | None
    plan: _Plan
    seed: int

    @property
    def classes(self) -> list[int]:
        """The classes with images."""
        found: list[int] = self.images.labels.unique().tolist()
        return found

    @property
    def words(self) -> str:
        """The setting, as words for a report."""
        return f"extractor: {self.source.value}"

    def exposure(self, features: torch.Tensor, labels: torch.Tensor, samples: Samples) -> Values:
        """Return `exposure` of features; standardised by map, as surrogates share the positions of a map and not its levels."""

        def draw(label: int, count: int) -> torch.Tensor:
            return gradients.standardised(samples(label, count), self.spec, _LEAST_SPREAD)

        return exposure(gradients.standardised(features, self.spec, _LEAST_SPREAD), labels, draw, self.plan.samples)

    def memory(self, samples: Samples, before: Samples | None) -> Figure:
        """Return the figure of all images: how well exposure separates training images from others."""
        labels, members = self.images.labels, np.arange(len(self.images)) < len(self.images) // 2
        score = self.exposure(self.features, labels, samples)
        blind = np.zeros(len(score)) if before is None else self.exposure(self.features, labels, before)
        before_is = "the same distances to the generator before the round"
        floor = max(("a coin toss", _COIN), (before_is, auc(*sides(blind, members))), key=lambda one: one[1])
        return _MEMORY.figure(
            self.words,
            {Knowledge.UPDATE, Knowledge.CANDIDATES} | self.source.knowledge,
            auc_gain(score, np.zeros(len(score)), members, self.seed).over(-_COIN),
            floor,
            len(score) // 2,
            gain=auc_gain(score, blind, members, self.seed),
            chance=chance_of_gain(aucs, _COIN, (score, blind), members, labels, self.seed),
        )

    def worst(self, samples: Samples) -> Figure:
        """Return the figure of the most exposed training image."""
        scores, labels = self.exposure(self.every_feature, self.everyone.labels, samples), self.everyone.labels.numpy()
        if self.known is not None:
            others = self.exposure(*self.known, samples)
            scores = standardised_by_class(scores, labels, others, self.known[1].numpy())
        known = {Knowledge.LATER if one is Knowledge.PRIVATE else one for one in self.source.knowledge}
        return worst_figure(self.words, known | {Knowledge.UPDATE, Knowledge.CANDIDATES}, scores, self.trained)

    def inverted(self, samples: Samples) -> Iterator[Figure]:
        """Yield the figures of decoded samples; none without a decoder."""
        for alike, measure in _INVERTED if self.decoder is not None else ():
            tables = [likeness(alike, self.decoded(samples, label), self.pixels(label)) for label in self.classes]
            nearest, other, gain, likely = nearest_gain(tables, self.seed)
            yield measure.figure(
                self.words,
                {Knowledge.UPDATE, Knowledge.AUXILIARY} | self.source.knowledge,
                nearest,
                ("the nearest of equally many images of the class that were not trained on", other),
                self.plan.pictures * len(self.classes),
                gain=gain,
                chance=likely,
            )

    def decoded(self, samples: Samples, label: int) -> torch.Tensor:
        """Return pictures of a class's samples."""
        assert self.decoder is not None
        return self.decoder(samples(label, self.plan.pictures))

    def pixels(self, label: int) -> torch.Tensor:
        """Return a class's training images, then its held-out images."""
        return unit_pixels(self.images.images[self.images.labels == label])


def _controls(attacked: _Setting, own: _Setting, mine: Samples, streams: Streams) -> Iterator[Control]:
    """Run the attacks on generators that memorised features of the device's own extractor, if it is known.

    They use the attacker's extractor, but for `memory_worst`, which also counts with the device's own.
    """
    count = len(own.images) // 2
    memory = planted(own.features[:count], own.images.labels[:count], streams)
    chosen = torch.randperm(own.trained, generator=streams.generator("memorised"))[:_MEMORISED]
    labels = own.everyone.labels[chosen]
    few = planted(own.every_feature[chosen], labels, streams)

    def draw(label: int, count: int) -> torch.Tensor:
        repeated = max(1, int(_REPEATED * count)) if bool((labels == label).any()) else 0
        return torch.cat([few(label, repeated), mine(label, count)[repeated:]]) if repeated else mine(label, count)

    of_few = f"{len(chosen)} training images, in {_REPEATED:.0%} of the samples of their class"
    for one in (attacked.memory(memory, None), own.worst(draw), *attacked.inverted(memory)):
        what = of_few if one.name == _WORST.name else "all training images"
        title = f"{one.name}, {one.setting}, on a planted generator that returns the features of {what}"
        passed = one.p is not None and one.p < _SURE
        yield Control(title, one.value.value, f"above {one.floor:.3g}, p below 1 %", passed, one.name)


def _pictures(setting: _Setting, mine: Samples) -> Pictures:
    columns = []
    for label in setting.classes[:10]:
        decoded, images = setting.decoded(mine, label)[:1], setting.pixels(label)
        order = measures.psnr(decoded.repeat(len(images), 1, 1, 1), images).reshape(2, -1).argmax(axis=1)
        columns.append((decoded[0], images[order[0]], images[len(images) // 2 + order[1]]))
    names = ("decoded sample", "nearest training image", "nearest other image")
    rows = tuple((name, tuple(measures.png(column[at]) for column in columns)) for at, name in enumerate(names))
    return Pictures(f"decoded samples of the generator ({setting.words})", rows)


def _settings(case: Case, plan: _Plan, streams: Streams, tick: Tick) -> Iterator[_Setting]:
    """Yield the attacker's setting first, then the one with the true extractor."""
    view, truth = case.view, case.truth
    images = joined(*truth.matched(streams.generator("matched"), plan.images))
    everyone = joined(truth.train, truth.held_out)
    given, classifier, known = view.with_private(truth.after or {}), view.update[Part.CLASSIFIER], view.auxiliary
    for source in _sources(case):
        weights = networks.estimated_extractor(given, source, classifier, streams, plan.surrogate_epochs)
        extractor = load_part(view.spec, Part.EXTRACTOR, weights)

        def features(some: ImageSet, extractor: nn.Module = extractor) -> torch.Tensor:
            return extract_features(extractor, some.images, view.spec).flatten(1)

        others = None if known is None else (features(known), known.labels)
        decoder = None if known is None else trained_decoder(known, features(known), plan.decoder, streams, tick)
        sets = images, features(images), everyone, features(everyone), len(truth.train)
        yield _Setting(source, view.spec, *sets, others, decoder, plan, streams.seed("draws"))


def _sources(case: Case) -> tuple[Extractor, ...]:
    mine = () if case.lacks(auxiliary=True) else (Extractor.SURROGATE,)
    return case.view.extractors(*mine, *(() if case.truth.after is None else (Extractor.TRUE,)))


def _carry_out(trial: Trial) -> Iterator[Found]:
    """Yield distances and decoded pictures for the attacker's extractor, and for the true one if given."""
    case, plan, streams = trial.case, _PLANS[trial.effort], trial.streams
    tick = trial.steps(len(_sources(case)) * plan.decoder)
    mine = samples_of(case.view, case.view.update[Part.GENERATOR], streams)
    earlier = case.view.before.parts.get(Part.GENERATOR)
    before = None if earlier is None else samples_of(case.view, earlier, streams)
    yield "training images are compared with equally many other images of the same classes"
    figures: list[Figure] = []
    settings = list(_settings(case, plan, streams, tick))
    for setting in settings:
        figures += [setting.memory(mine, before), setting.worst(mine), *setting.inverted(mine)]
        if setting.decoder is not None:
            yield _pictures(setting, mine)
    own = {one.name: one.value.value for one in figures if one.setting == settings[-1].words}
    for one in figures:
        yield one if one.setting == settings[-1].words else replace(one, ceiling=own.get(one.name))
    yield from _controls(settings[0], settings[-1], mine, streams)


def _lacks(case: Case) -> str | None:
    if not _sources(case):
        return case.lacks(auxiliary=True)
    both = [set(some.labels.tolist()) for some in (case.truth.train, case.truth.held_out)]
    if not both[0] & both[1]:
        return "no class has both training images and other images: give some with --held-out"
    return None


ATTACK = Attack(
    "memorisation",
    "Memorisation by the generator",
    "Does the sent generator reveal training images?",
    "FedCG §3.4 (the claim); distances as SDMetrics' DCROverfittingProtection; an inverter of features",
    _carry_out,
    parts=frozenset({Part.GENERATOR, Part.CLASSIFIER}),
    held_out=True,
    lacking=_lacks,
    least_side=7,
)
