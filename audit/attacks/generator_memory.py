"""Whether the generator that was sent has memorised training images: its samples' distance to them, and images decoded from its samples.

Both compare images that were trained on with equally many of the same classes that were not: whatever holds for all images of a
class cancels out. FedCG §3.4 holds that a generator shows a distribution and no image; nobody has measured it.
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

_MOST_NUMBERS = 1 << 24  # of the samples of one class: 64 MB
_PERMUTATIONS = 1000
_PLANTED_NOISE = 0.01
_DECODED = "likeness of decoded samples to the nearest image trained on"
_MEMORY = measures.Measure(
    "memory_auc", "images trained on told from others by their distance to the generator's samples"
)
_INVERTED: Sequence[tuple[measures.Likeness, measures.Measure]] = (
    (measures.psnr, measures.Measure("inverter_psnr", _DECODED, "dB")),
    (measures.ssim, measures.Measure("inverter_ssim", _DECODED)),
)

Samples = Callable[[int, int], torch.Tensor]
"""(class, how many) -> features of a generator, [n, F]."""


def samples_of(view: View, generator: Weights, streams: Streams) -> Samples:
    """G(z, y) of a generator; the noise of a class is the same for every generator."""
    network = load_part(view.spec, Part.GENERATOR, generator)

    def draw(label: int, count: int) -> torch.Tensor:
        noise = torch.randn(count, view.spec.network.noise_dim, generator=streams.generator("noise", label))
        return generate(network, noise, torch.full((count,), label)).flatten(1)

    return draw


def planted(features: torch.Tensor, labels: torch.Tensor, streams: Streams) -> Samples:
    """A generator that has memorised: the features of training images in turn, with noise of 1 % of their deviation."""

    def draw(label: int, count: int) -> torch.Tensor:
        mine = features[labels == label]
        noise = torch.randn(count, features.shape[1], generator=streams.generator("planted", label))
        return mine[torch.arange(count) % len(mine)] + _PLANTED_NOISE * features.std() * noise

    return draw


@dataclass(frozen=True)
class Nearness:
    """How near images are to the samples.

    Attributes:
        train: [N] minus the distance of each image that was trained on to the nearest sample of its class; `held_out` likewise.
        nearer: share of the samples that are nearer to an image trained on than to any held out (SDMetrics' overfitting protection).
    """

    train: measures.Values
    held_out: measures.Values
    nearer: float


def nearness(
    train: torch.Tensor, held_out: torch.Tensor, labels: torch.Tensor, samples: Samples, count: int
) -> Nearness:
    """Distances of features [N, F], both of the same labels [N], to the nearest of `count` samples of their class (fewer of long features)."""
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
    """A measure of every pair, [pictures, images]."""
    pairs = measure(pictures.repeat_interleave(len(images), 0), images.repeat(len(pictures), 1, 1, 1))
    return pairs.reshape(len(pictures), len(images))


def nearest_gain(tables: Sequence[measures.Values], seed: int) -> tuple[measures.Interval, float, measures.Interval]:
    """How much nearer each picture's nearest image that was trained on is than its nearest held-out one.

    Pictures of a class share their nearest image, so they are no independent samples: the gain's interval comes from 1,000 draws of which
    images count as trained on, which is what the figure would be where nothing was memorised.

    Args:
        tables: by class, likeness [pictures, 2 n]: n images that were trained on, then n held out.
        seed: of the draws.

    Returns:
        Likeness to the nearest image trained on, to the nearest held-out one, and the gain.
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
    """How much is done: `samples` of the generator a class, steps of the `decoder`, `pictures` decoded a class, `images` matched a class."""

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
    """One extractor's view of `images`, trained on and held out: all features are [N, F]."""

    source: Extractor
    images: tuple[ImageSet, ImageSet]
    train: torch.Tensor
    held_out: torch.Tensor
    decoder: Decoder | None
    plan: _Plan
    seed: int

    @property
    def labels(self) -> torch.Tensor:
        """Of the images trained on, and of those held out."""
        return self.images[0].labels

    @property
    def classes(self) -> list[int]:
        """The classes there are."""
        found: list[int] = self.labels.unique().tolist()
        return found

    @property
    def words(self) -> str:
        """For a report."""
        return f"extractor: {self.source.value}"

    def nearness(self, samples: Samples) -> Nearness:
        """Of all images."""
        return nearness(self.train, self.held_out, self.labels, samples, self.plan.samples)

    def tables(self, samples: Samples, measure: measures.Likeness) -> list[measures.Values]:
        """By class, likeness of decoded samples to the images trained on and to those held out."""
        return [likeness(measure, self.decoded(samples, label), self.pixels(label)) for label in self.classes]

    def decoded(self, samples: Samples, label: int) -> torch.Tensor:
        """Pictures of a class's samples."""
        assert self.decoder is not None
        return self.decoder(samples(label, self.plan.pictures))

    def pixels(self, label: int) -> torch.Tensor:
        """A class's images that were trained on, then those held out."""
        return measures.unit_pixels(torch.cat([some.images[some.labels == label] for some in self.images]))


def wins(scores: Nearness) -> measures.Values:
    """[N, N]: 1 where an image trained on is nearer than a held-out one, 1/2 where both are as near; its mean is the AUC (Mann-Whitney)."""
    train, held_out = scores.train[:, None], scores.held_out[None, :]
    table: measures.Values = (train > held_out) + 0.5 * (train == held_out)
    return table


def _mean_of_pairs(table: measures.Values, seed: int) -> measures.Interval:
    """The mean of a table [N, N] with its interval: row i and column i, of the same class, are drawn together."""

    def mean(drawn: measures.Values) -> float:
        rows = drawn.astype(int)
        return float(table[np.ix_(rows, rows)].mean())

    return measures.bootstrap(np.arange(len(table), dtype=float), seed, mean)


def _figures(setting: _Setting, mine: Samples, found: Nearness, before: Nearness | None) -> Iterator[measures.Figure]:
    """Of the distances and, where there is a decoder, of decoded samples."""
    used = {Knowledge.UPDATE} | setting.source.knowledge
    value, floor, floor_is = wins(found), np.array(0.5), "a coin's toss"
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
    """The same on a planted generator that has memorised."""
    memory = planted(setting.train, setting.labels, streams)
    value = float(wins(setting.nearness(memory)).mean())
    yield measures.Control(
        "planted generator that returns training features: memory_auc", value, "above 0.9", value > 0.9
    )
    if setting.decoder is not None:
        gain = nearest_gain(setting.tables(memory, measures.psnr), setting.seed)[2]
        title = "planted generator that returns training features: gain of inverter_psnr in dB"
        yield measures.Control(title, gain.value, "above 0, confidence bound included", gain.low > 0)


def _pictures(setting: _Setting, mine: Samples) -> measures.Pictures:
    columns = []
    for label in setting.classes[:10]:
        decoded, images = setting.decoded(mine, label)[:1], setting.pixels(label)
        order = measures.psnr(decoded.repeat(len(images), 1, 1, 1), images).reshape(2, -1).argmax(axis=1)
        columns.append((decoded[0], images[order[0]], images[len(images) // 2 + order[1]]))
    names = ("decoded sample", "nearest image trained on", "nearest image not trained on")
    rows = tuple((name, tuple(measures.png(column[at]) for column in columns)) for at, name in enumerate(names))
    return measures.Pictures(f"what the generator's samples look like ({setting.words})", rows)


def _settings(case: Case, plan: _Plan, streams: Streams, tick: Tick) -> Iterator[_Setting]:
    """The attacker's setting first, then with the true extractor."""
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
    """Distances and decoded pictures by the attacker's extractor, and by the true one where it was given."""
    case, plan, streams = trial.case, _Plan.of(trial.effort), trial.streams
    tick = trial.steps(len(_sources(case)) * plan.decoder)
    mine = samples_of(case.view, case.view.update[Part.GENERATOR], streams)
    earlier = case.view.before.parts.get(Part.GENERATOR)
    before = None if earlier is None else samples_of(case.view, earlier, streams)
    yield "images trained on are compared with equally many of the same classes that were not"
    figures: list[measures.Figure] = []
    settings = list(_settings(case, plan, streams, tick))
    for setting in settings:
        found = setting.nearness(mine)
        figures += _figures(setting, mine, found, before and setting.nearness(before))
        yield f"{found.nearer:.0%} of the samples are nearer to an image trained on than to any held out ({setting.words})"
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
        return "no class has images that were trained on and others that were not: give some as --held-out"
    return None


ATTACK = Attack(
    "memorisation",
    "Memorisation by the generator",
    "Does the generator that is sent give away training images?",
    "FedCG §3.4 (the claim); distances as SDMetrics' DCROverfittingProtection; an inverter of features",
    _carry_out,
    parts=frozenset({Part.GENERATOR, Part.CLASSIFIER}),
    held_out=True,
    lacking=_lacks,
    least_side=7,
)
