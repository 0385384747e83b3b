"""Tests whether the sent generator has memorised training images, by its samples' distance to them and by images decoded from its samples.

Both compare training images with equally many other images of the same classes, so that effects common to a class
cancel out. FedCG §3.4 claims that a generator shows a distribution and no single image. No measurement of this claim is
published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from audit import measures
from audit.attacks.attack import Attack, Effort, Found, Tick, Trial
from audit.evidence import Case, Extractor, Knowledge, View, networks
from audit.techniques.image_decoder import Decoder, trained_decoder
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import extract_features, generate
from fedcg.wire.parts import Part

_MOST_NUMBERS = 1 << 24  # numbers in the samples of one class: 64 MB
_PERMUTATIONS = 1000
_PLANTED_NOISE = 0.01
_DECODED = "similarity of decoded samples to the nearest training image"
_MEMORY = measures.Measure(
    "memory_auc", "training images distinguished from others by their distance to the generator's samples"
)
_INVERTED: Sequence[tuple[measures.Likeness, measures.Measure]] = (
    (measures.psnr, measures.Measure("inverter_psnr", _DECODED, "dB")),
    (measures.ssim, measures.Measure("inverter_ssim", _DECODED)),
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


@dataclass(frozen=True)
class Nearness:
    """The distances of images to the samples.

    Attributes:
        train: [N] negative distance of each training image to the nearest sample of its class; `held_out` likewise.
        nearer: share of the samples that are nearer to a training image than to any held-out one (SDMetrics'
            overfitting protection).
    """

    train: measures.Values
    held_out: measures.Values
    nearer: float


def nearness(
    train: torch.Tensor, held_out: torch.Tensor, labels: torch.Tensor, samples: Samples, count: int
) -> Nearness:
    """Compute distances of features [N, F], both with the same labels [N], to the nearest of `count` samples of their class (fewer for long features)."""
    count = max(2, min(count, _MOST_NUMBERS // train.shape[1]))
    found, shares = torch.empty(2, len(labels)), []
    for label in labels.unique().tolist():
        mine = labels == label
        drawn = samples(label, count)
        distances = [torch.cdist(some[mine], drawn) for some in (train, held_out)]
        for row, some in zip(found, distances, strict=True):
            row[mine] = -some.min(1).values
        shares.append((distances[0].min(0).values < distances[1].min(0).values).double().mean())
    scores = found.double().numpy()
    return Nearness(scores[0], scores[1], float(torch.stack(shares).mean()))


def likeness(measure: measures.Likeness, pictures: torch.Tensor, images: torch.Tensor) -> measures.Values:
    """Return a measure of every pair, [pictures, images]."""
    pairs = measure(pictures.repeat_interleave(len(images), 0), images.repeat(len(pictures), 1, 1, 1))
    return pairs.reshape(len(pictures), len(images))


def nearest_gain(tables: Sequence[measures.Values], seed: int) -> tuple[measures.Interval, float, measures.Interval]:
    """Compare each picture's nearest training image with its nearest held-out image.

    Pictures of a class share their nearest image, so they are not independent samples. The gain's interval therefore
    comes from 1,000 random assignments of images to "trained on": the distribution of the figure if nothing was
    memorised.

    Args:
        tables: by class, similarity [pictures, 2 n]: n training images, then n held out.
        seed: for the random assignments.

    Returns:
        Similarity to the nearest training image, to the nearest held-out one, and the gain.
    """
    drawn = np.random.default_rng(seed)

    def nearest_of(some: Sequence[measures.Values]) -> measures.Values:
        return np.concatenate([table.reshape(len(table), 2, -1).max(axis=2) for table in some])

    nearest = nearest_of(tables)
    chance = [
        nearest_of([drawn.permutation(table, axis=1) for table in tables]).mean(axis=0) for _ in range(_PERMUTATIONS)
    ]
    by_chance = measures.percentile_interval(0.0, [float(train - held_out) for train, held_out in chance])
    train, held_out = nearest.mean(axis=0)
    gain = float(train - held_out)
    return (
        measures.bootstrap(nearest[:, 0], seed),
        float(held_out),
        measures.Interval(gain, gain - by_chance.high, gain - by_chance.low),
    )


@dataclass(frozen=True)
class _Plan:
    """The amount of work: `samples` of the generator per class, steps of the `decoder`, decoded `pictures` and matched `images` per class."""

    samples: int
    decoder: int
    pictures: int
    images: int
    surrogate_epochs: int

    @staticmethod
    def of(effort: Effort) -> _Plan:
        return _Plan(
            effort.of(300, 2000, 10_000),
            effort.of(200, 1500, 5000),
            effort.of(4, 10, 40),
            effort.of(20, 50, 200),
            effort.of(5, 20, 40),
        )


@dataclass(frozen=True)
class _Setting:
    """One extractor's view of `images`, training and held-out: all features are [N, F]."""

    source: Extractor
    images: tuple[ImageSet, ImageSet]
    train: torch.Tensor
    held_out: torch.Tensor
    decoder: Decoder | None
    plan: _Plan
    seed: int

    @property
    def labels(self) -> torch.Tensor:
        """The features of the training images and of the held-out images."""
        return self.images[0].labels

    @property
    def classes(self) -> list[int]:
        """The classes with images."""
        found: list[int] = self.labels.unique().tolist()
        return found

    @property
    def words(self) -> str:
        """The setting, as words for a report."""
        return f"extractor: {self.source.value}"

    def nearness(self, samples: Samples) -> Nearness:
        """The distances of all images."""
        return nearness(self.train, self.held_out, self.labels, samples, self.plan.samples)

    def tables(self, samples: Samples, measure: measures.Likeness) -> list[measures.Values]:
        """By class, the similarity of decoded samples to training images and to held-out images."""
        return [likeness(measure, self.decoded(samples, label), self.pixels(label)) for label in self.classes]

    def decoded(self, samples: Samples, label: int) -> torch.Tensor:
        """Return pictures of a class's samples."""
        assert self.decoder is not None
        return self.decoder(samples(label, self.plan.pictures))

    def pixels(self, label: int) -> torch.Tensor:
        """Return a class's training images, then its held-out images."""
        return measures.unit_pixels(torch.cat([some.images[some.labels == label] for some in self.images]))


def wins(scores: Nearness) -> measures.Values:
    """Return [N, N]: 1 where a training image is nearer than a held-out one, 1/2 for ties; its mean is the AUC (Mann-Whitney)."""
    train, held_out = scores.train[:, None], scores.held_out[None, :]
    table: measures.Values = (train > held_out) + 0.5 * (train == held_out)
    return table


def _mean_of_pairs(table: measures.Values, seed: int) -> measures.Interval:
    """Return the mean of a table [N, N] with its interval: row i and column i, of the same class, are resampled together."""

    def mean(drawn: measures.Values) -> float:
        rows = drawn.astype(int)
        return float(table[np.ix_(rows, rows)].mean())

    return measures.bootstrap(np.arange(len(table), dtype=float), seed, mean)


def _figures(setting: _Setting, mine: Samples, found: Nearness, before: Nearness | None) -> Iterator[measures.Figure]:
    """Yield the figures of the distances and, with a decoder, of decoded samples."""
    used = {Knowledge.UPDATE} | setting.source.knowledge
    value, floor, floor_is = wins(found), np.array(0.5), "a coin toss"
    if before is not None and wins(before).mean() > 0.5:
        floor, floor_is = wins(before), "the same distances to the generator before the round"
    yield _MEMORY.figure(
        setting.words,
        used | {Knowledge.CANDIDATES},
        _mean_of_pairs(value, setting.seed),
        (floor_is, float(floor.mean())),
        len(value),
        gain=_mean_of_pairs(value - floor, setting.seed),
    )
    for alike, measure in _INVERTED if setting.decoder is not None else ():
        nearest, other, gain = nearest_gain(setting.tables(mine, alike), setting.seed)
        yield measure.figure(
            setting.words,
            used | {Knowledge.AUXILIARY},
            nearest,
            ("the nearest of equally many images of the class that were not trained on", other),
            setting.plan.pictures * len(setting.classes),
            gain=gain,
        )


def _controls(setting: _Setting, streams: Streams) -> Iterator[measures.Control]:
    """Run the attacks on a planted generator that has memorised."""
    memory = planted(setting.train, setting.labels, streams)
    value = float(wins(setting.nearness(memory)).mean())
    yield measures.Control(
        "planted generator that returns training features: memory_auc", value, "above 0.9", value > 0.9
    )
    if setting.decoder is not None:
        gain = nearest_gain(setting.tables(memory, measures.psnr), setting.seed)[2]
        title = "planted generator that returns training features: gain of inverter_psnr in dB"
        yield measures.Control(title, gain.value, "above 0, including the confidence bound", gain.low > 0)


def _pictures(setting: _Setting, mine: Samples) -> measures.Pictures:
    columns = []
    for label in setting.classes[:10]:
        decoded, images = setting.decoded(mine, label)[:1], setting.pixels(label)
        order = measures.psnr(decoded.repeat(len(images), 1, 1, 1), images).reshape(2, -1).argmax(axis=1)
        columns.append((decoded[0], images[order[0]], images[len(images) // 2 + order[1]]))
    names = ("decoded sample", "nearest training image", "nearest other image")
    rows = tuple((name, tuple(measures.png(column[at]) for column in columns)) for at, name in enumerate(names))
    return measures.Pictures(f"decoded samples of the generator ({setting.words})", rows)


def _settings(case: Case, plan: _Plan, streams: Streams, tick: Tick) -> Iterator[_Setting]:
    """Yield the attacker's setting first, then the one with the true extractor."""
    view, images = case.view, case.truth.matched(streams.generator("matched"), plan.images)
    given = view.with_private(case.truth.after or {})
    for source in _sources(case):
        weights = networks.estimated_extractor(
            given, source, view.update[Part.CLASSIFIER], streams, plan.surrogate_epochs
        )
        extractor = load_part(view.spec, Part.EXTRACTOR, weights)
        train, held_out = (extract_features(extractor, some.images, view.spec).flatten(1) for some in images)
        decoder = None
        if view.auxiliary is not None:
            known = extract_features(extractor, view.auxiliary.images, view.spec).flatten(1)
            decoder = trained_decoder(view.auxiliary, known, plan.decoder, streams, tick)
        yield _Setting(source, images, train, held_out, decoder, plan, streams.seed("draws"))


def _sources(case: Case) -> tuple[Extractor, ...]:
    mine = () if case.lacks(auxiliary=True) else (Extractor.SURROGATE,)
    return case.view.extractors(*mine, *(() if case.truth.after is None else (Extractor.TRUE,)))


def _carry_out(trial: Trial) -> Iterator[Found]:
    """Yield distances and decoded pictures for the attacker's extractor, and for the true one if given."""
    case, plan, streams = trial.case, _Plan.of(trial.effort), trial.streams
    tick = trial.steps(len(_sources(case)) * plan.decoder)
    mine = samples_of(case.view, case.view.update[Part.GENERATOR], streams)
    earlier = case.view.before.parts.get(Part.GENERATOR)
    before = None if earlier is None else samples_of(case.view, earlier, streams)
    yield "training images are compared with equally many other images of the same classes"
    figures: list[measures.Figure] = []
    settings = list(_settings(case, plan, streams, tick))
    for setting in settings:
        found = setting.nearness(mine)
        figures += _figures(setting, mine, found, before and setting.nearness(before))
        yield f"{found.nearer:.0%} of the samples are nearer to a training image than to any held-out one ({setting.words})"
        if setting.decoder is not None:
            yield _pictures(setting, mine)
    own = {one.name: one.value.value for one in figures} if settings[-1].source.is_own else {}
    for one in figures:
        yield replace(one, ceiling=own.get(one.name)) if one.is_possible else one
    yield from _controls(settings[-1], streams)


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
